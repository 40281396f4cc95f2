// Shows the page that the address names: the table of runs, a run, a comparison, sweeps or recorded episodes.

import { showComparison } from "./compare_page.js";
import { element } from "./dom.js";
import { showRun } from "./run_page.js";
import { showRunTable } from "./run_table.js";
import { PageScope, showStatus } from "./service.js";
import { showSweep, showSweeps } from "./sweep_pages.js";
import { showTrajectories } from "./trajectory_page.js";

const main = document.getElementById("main");
let scope = null;

function parseAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const decode = (part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  };
  return [path.split("/").filter(Boolean).map(decode), new URLSearchParams(query || "")];
}

function choosePage([first, second, third]) {
  if (!first) return showRunTable;
  if (first === "runs" && second && third === "trajectories") return showTrajectories;
  if (first === "runs" && second) return showRun;
  if (first === "compare") return showComparison;
  if (first === "sweeps") return second ? showSweep : showSweeps;
  if (first === "expired") return showExpired;
  return showUnknown;
}

async function show() {
  scope?.close();
  const current = scope = new PageScope();
  const [parts, query] = parseAddress();
  main.replaceChildren();
  main.className = "";
  document.title = "Palaestra runs";
  showStatus("");
  try {
    await choosePage(parts)(main, current, parts, query);
  } catch (error) {
    if (current.isClosed) return;
    if (error.status === 401) {
      // Streams and repeated requests would be refused, too.
      current.close();
      showNoAccess();
    } else main.replaceChildren(element("p", { class: "error", role: "alert" }, error.message));
  }
  document.documentElement.dataset.ready = "yes";
}

function showNoAccess() {
  main.replaceChildren(
    element("h1", {}, "This browser has no access"),
    element("p", {}, "Access is given by a link that works once. Create one on the machine of the run service:"),
    element("pre", {}, "palaestra runs open"),
    element("p", {}, "Access ends after 14 days, and when the token of the service changes."),
  );
}

async function showExpired(main, scope) {
  // A link that was opened twice in the same browser is no problem: the first time gave access.
  await scope.read("/runs", { limit: 1 });
  location.replace("#/");
}

function showUnknown(main) {
  main.replaceChildren(element("p", { class: "error" }, "There is no such page."), element("a", { href: "#/" }, "All runs"));
}

window.addEventListener("hashchange", show);
show();
