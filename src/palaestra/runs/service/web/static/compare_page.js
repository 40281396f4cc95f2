// Selected runs side by side: grouped by configuration without seed, with curves and the configuration that differs.

import { Chart, COLORS } from "./chart.js";
import { buildTable, element, formatNumber, formatRange, formatValue, runLink } from "./dom.js";

export async function showComparison(main, scope, parts, query) {
  const runs = query.getAll("run"), sweep = query.get("sweep") || "";
  const metric = query.get("metric") || "return";
  if (runs.length < 2 && !sweep) throw new Error("Select two runs or more in the table of runs.");
  document.title = "Comparison – Palaestra";
  const input = element("input", { type: "search", value: metric, "aria-label": "Metric", spellcheck: false });
  const change = (event) => {
    event.preventDefault();
    const address = new URLSearchParams([...runs.map((run) => ["run", run]), ["sweep", sweep], ["metric", input.value.trim() || "return"]]);
    location.hash = `#/compare?${address}`;
  };
  main.append(
    element("h1", {}, sweep ? `Comparison of sweep ${sweep}` : `Comparison of ${runs.length} runs`),
    element("form", { class: "filters", onsubmit: change }, element("label", {}, "Metric"), input, element("button", {}, "Apply")),
  );
  const selection = { run: runs, sweep, metric };
  const waiting = element("p", { class: "dim" }, "Comparing …");
  main.append(waiting);
  const comparison = await scope.read("/compare/groups", selection).finally(() => waiting.remove());
  const chart = new Chart(metric, scope);
  main.append(chart.root);
  const rows = comparison.groups.map((group, index) => {
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = COLORS[index % COLORS.length];
    const parameters = Object.entries(group.parameters).map(([key, value]) => `${key}=${formatValue(value)}`).join(", ");
    const links = element("span", {}, ...group.runs.flatMap((score) => [runLink(score.run_id, score.seed === null ? score.run_id : `seed ${score.seed}`), " "]));
    return [
      element("span", {}, swatch, group.label), parameters, group.mean, formatRange(group.low, group.high), group.iqm,
      formatRange(group.iqm_low, group.iqm_high), group.time_s, group.on_front ? "★" : "", links,
    ];
  });
  main.append(
    element("p", { class: "dim" }, `${comparison.metric} at step ${formatNumber(comparison.step ?? 0)} (${comparison.window})`),
    buildTable(["", "configuration", "mean", "95 % interval", "IQM", "95 % interval", "seconds", "front", "runs"], rows),
    element("ul", { class: "dim" }, ...comparison.notes.map((note) => element("li", {}, note))),
  );
  if (runs.length >= 2) await showDifferences(main, scope, runs);
  const curves = await scope.read("/compare/curves", selection);
  chart.setSeries(curves.curves.map((curve, index) => ({
    label: curve.label,
    color: COLORS[index % COLORS.length],
    points: curves.steps.map((step, place) => [step, curve.mean[place]]),
    band: curves.steps.map((step, place) => [step, curve.low[place], curve.high[place]]),
  })));
  chart.root.dataset.loaded = "yes";
}

async function showDifferences(main, scope, runs) {
  const comparison = await scope.read("/compare", { run: runs });
  const titles = ["", ...comparison.runs.map(({ run }) => runLink(run.run_id, run.name || run.run_id))];
  const toRows = (values) => Object.entries(values).map(([key, list]) => [key, ...list]);
  for (const [title, values] of [["Configuration that differs", comparison.configuration], ["Metrics", comparison.metrics]]) {
    if (!Object.keys(values).length) continue;
    main.append(element("h2", {}, title), buildTable(titles.map((node) => (node instanceof Node ? node.cloneNode(true) : node)), toRows(values)));
  }
}
