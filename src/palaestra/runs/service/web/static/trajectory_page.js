// The recorded screen episodes of a run: what the model saw, replied and did.

import { element, formatNumber, formatTime, isNumber, runLink } from "./dom.js";
import { quotePath, runPath } from "./service.js";

const PAGE_SIZE = 200;

export async function showTrajectories(main, scope, [, runId]) {
  document.title = `Episodes of ${runId} – Palaestra`;
  const list = element("ol", { class: "episodes", "aria-label": "Episodes" });
  const more = element("button", { hidden: true, onclick: () => loadPage() }, "Older episodes");
  const episode = element("article", {});
  main.append(element("h1", {}, "Episodes of ", runLink(runId)), element("div", { class: "viewer" }, element("div", {}, list, more), episode));
  let last = null, opened = 0;

  async function loadPage() {
    const page = await scope.read(runPath(runId, "/trajectories"), { limit: PAGE_SIZE, before: last });
    for (const one of page) {
      const button = element("button", { onclick: () => open(one.file, button) },
        element("div", {}, `${one.task} · ${one.outcome} · ${formatNumber(one.reward)}`),
        element("div", { class: "dim" }, `${one.steps} ${one.steps === 1 ? "turn" : "turns"} · ${one.kind} · ${formatTime(one.started_at)}`));
      list.append(element("li", {}, button));
    }
    last = page.length ? page[page.length - 1].file : last;
    more.hidden = page.length < PAGE_SIZE;
    return page;
  }

  async function open(file, button) {
    const mine = opened += 1;
    for (const other of list.querySelectorAll("button")) other.setAttribute("aria-current", other === button);
    const document = await scope.read(runPath(runId, `/trajectories/${quotePath(file)}`));
    if (mine !== opened) return;
    const source = (sha256) => runPath(runId, `/trajectories/${quotePath(file)}/pictures/${sha256}`);
    episode.replaceChildren(
      element("h2", {}, document.summary.instruction || document.summary.task),
      element("p", { class: "dim" }, `${document.summary.outcome}${document.summary.reason ? `: ${document.summary.reason}` : ""} · seed ${document.summary.seed}`),
      ...document.turns.map((turn, index) => buildTurn(turn, index, source)),
      document.last_picture ? element("div", { class: "turn" }, element("div", { class: "screen" }, element("img", { src: source(document.last_picture), alt: "last screen", loading: "lazy" })), element("p", { class: "dim" }, "After the last action")) : "",
    );
  }

  const first = await loadPage();
  if (first.length) await open(first[0].file, list.querySelector("button"));
  else episode.append(element("p", { class: "dim" }, "The run has recorded no screen episodes."));
}

function buildTurn(turn, index, source) {
  const screen = element("div", { class: "screen" });
  const picture = turn.pictures[turn.pictures.length - 1];
  if (picture) {
    screen.append(element("img", { src: source(picture.sha256), alt: `screen ${index + 1}`, loading: "lazy" }));
    if (turn.point && picture.width && picture.height) {
      const mark = element("div", { class: "mark" });
      mark.style.left = `${(100 * turn.point[0]) / picture.width}%`;
      mark.style.top = `${(100 * turn.point[1]) / picture.height}%`;
      screen.append(mark);
    }
  }
  const total = turn.log_probs.filter(isNumber).reduce((sum, value) => sum + value, 0);
  return element("div", { class: "turn" }, screen, element("div", {},
    element("p", {}, element("strong", {}, `Turn ${index + 1}`), element("span", { class: "dim" }, ` · reward ${formatNumber(turn.reward)} · ${turn.token_ids.length} tokens · log-probability ${formatNumber(total)}`)),
    element("pre", {}, turn.text),
    turn.unreadable ? element("p", { class: "error" }, `Unreadable: ${turn.unreadable}`) : "",
    turn.action ? element("pre", { class: "dim" }, JSON.stringify(turn.action)) : ""));
}
