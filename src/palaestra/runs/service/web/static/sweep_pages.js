// The list of sweeps, and one sweep with its trials.

import { buildTable, element, formatRange, formatTime, formatValue, isNumber, runLink } from "./dom.js";

// As they are written in a configuration: 0.0003 and not 3.00e-4.
const formatParameter = (value) => (isNumber(value) ? String(value) : formatValue(value));
const describe = (parameters) => Object.entries(parameters).map(([key, value]) => `${key}=${formatParameter(value)}`).join(", ");
const describeRange = ({ values, ...range }) =>
  [...(values ?? []).map(formatParameter), ...Object.entries(range).map(([key, value]) => `${key} ${formatParameter(value)}`)].join(", ");
const countStates = (states) => Object.entries(states).map(([state, count]) => `${count} ${state}`).join(", ");
const sweepLink = (id) => element("a", { href: `#/sweeps/${encodeURIComponent(id)}` }, id);

export async function showSweeps(main, scope) {
  document.title = "Sweeps – Palaestra";
  const body = element("div", {});
  main.append(element("h1", {}, "Sweeps"), body);
  const refresh = async () => {
    const sweeps = await scope.read("/sweeps");
    const rows = sweeps.map((sweep) => [
      sweepLink(sweep.sweep_id), sweep.state, sweep.sampler, sweep.metric, `${countStates(sweep.trials)} of ${sweep.num_trials}`,
      sweep.best ? sweep.best.value : null, sweep.best ? describe(sweep.best.parameters) : "", formatTime(sweep.created),
    ]);
    const titles = ["sweep", "state", "sampler", "metric", "trials", "best", "configuration", "created"];
    body.replaceChildren(rows.length ? buildTable(titles, rows) : element("p", { class: "dim" }, "There are no sweeps. palaestra runs start --seeds 1..5 starts one."));
    return sweeps.some((sweep) => sweep.state === "running");
  };
  await refresh();
  scope.repeat(5, refresh);
}

export async function showSweep(main, scope, [, name]) {
  const body = element("div", {});
  main.append(body);
  const refresh = async () => {
    const { sweep, parameters, trials } = await scope.read(`/sweeps/${encodeURIComponent(name)}`);
    document.title = `${sweep.sweep_id} – Palaestra`;
    const rows = trials.map((trial) => [
      trial.number, describe(trial.parameters), trial.state, trial.value, formatRange(trial.low, trial.high), trial.reason,
      element("span", {}, ...trial.run_ids.flatMap((id, index) => [runLink(id, sweep.seeds.length > index ? `seed ${sweep.seeds[index]}` : id), " "])),
    ]);
    body.replaceChildren(
      element("h1", {}, sweep.sweep_id),
      element("p", {}, `${sweep.state} · ${sweep.sampler} · ${sweep.direction} ${sweep.metric} · ${countStates(sweep.trials)} of ${sweep.num_trials} trials`),
      sweep.reason ? element("p", { class: "dim" }, sweep.reason) : "",
      element("p", {}, element("a", { href: `#/compare?sweep=${encodeURIComponent(sweep.sweep_id)}&metric=${encodeURIComponent(sweep.metric)}` }, "Compare its configurations")),
      buildTable(["trial", "configuration", "state", sweep.metric, "95 % interval", "reason", "runs"], rows),
      element("h2", {}, "Parameters"),
      buildTable(["key", "values"], Object.entries(parameters).map(([key, value]) => [key, describeRange(value)])),
    );
    return sweep.state === "running";
  };
  await refresh();
  scope.repeat(5, refresh);
}
