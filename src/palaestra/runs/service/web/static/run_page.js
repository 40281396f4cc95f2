// One run: its state, live curves, output, checkpoints, videos and recorded episodes.

import { Chart, COLORS } from "./chart.js";
import { buildTable, elapsed, element, formatBytes, formatDuration, formatNumber, formatTime, formatValue, isLive, isNumber, phaseMark } from "./dom.js";
import { quotePath, runPath } from "./service.js";

const FIRST_METRICS = 8, MAX_METRICS = 32, MAX_NAME = 100, STORED_POINTS = 600, MAX_POINTS = 4000;
const LOG_TAIL_BYTES = 64 * 1024, MAX_LOG_CHARACTERS = 400_000;
const PREFERRED = ["return", "eval_return", "episode_return", "length", "success", "loss", "policy_loss", "value_loss", "entropy", "sps"];
const CONTROL = /\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/g;

export async function showRun(main, scope, [, name]) {
  let record = await scope.read(runPath(name));
  const runId = record.run_id;
  document.title = `${record.name || runId} – Palaestra`;
  const head = element("section", { class: "summary" });
  const curves = element("section", { class: "curves" });
  const log = element("section", { class: "log" });
  const files = element("section", { class: "files" });
  const details = element("section", { class: "details" });
  main.append(head, curves, log, files, details);
  drawSummary(head, record);

  const refresh = async () => {
    record = await scope.read(runPath(runId));
    drawSummary(head, record);
    return true;
  };
  // Slower once it has ended: it may be resumed, renamed or archived.
  let round = 0;
  scope.repeat(2, () => (isLive(record) || (round++) % 10 === 0 ? refresh() : true));
  await Promise.all([
    showCurves(curves, scope, runId, refresh),
    showLog(log, scope, runId, () => isLive(record)),
    showFiles(files, scope, runId),
    showDetails(details, scope, runId),
  ]);
}

function drawSummary(head, record) {
  const facts = [
    ["Environment", record.env_id],
    ["Agent", record.agent_id],
    ["Steps", record.total_steps ? `${formatNumber(record.env_step)} of ${formatNumber(record.total_steps)}` : formatNumber(record.env_step)],
    ["Episodes", formatNumber(record.episodes)],
    ["Return", formatNumber(record.episode_return)],
    ["Elapsed", formatDuration(elapsed(record))],
    ["Created", formatTime(record.created)],
    ["Seed", formatNumber(record.seed)],
    ["Attempt", record.attempt > 1 ? formatNumber(record.attempt) : ""],
    ["Host", record.host],
    ["Size", record.bytes_on_disk ? formatBytes(record.bytes_on_disk) : ""],
    ["Tags", record.tags.join(", ")],
  ].filter(([, value]) => value !== "");
  const reason = record.reason && record.reason !== record.phase ? element("span", { class: "dim" }, record.reason) : null;
  const meter = element("div", { class: "progress" }, element("div", {}));
  const share = record.total_steps ? Math.min(1, record.env_step / record.total_steps) : 0;
  meter.firstChild.style.width = `${share * 100}%`;
  head.replaceChildren(
    element("h1", record.favorite ? { title: "Favorite" } : {}, `${record.favorite ? "★ " : ""}${record.name || record.run_id}`),
    record.name ? element("p", { class: "id" }, record.run_id) : "",
    element("p", { class: "state" }, phaseMark(record.phase), " ", reason),
    isLive(record) && record.total_steps ? meter : "",
    ...record.alarms.map((alarm) => element("p", { class: "error" }, `${alarm.code}: ${alarm.text}`)),
    element("dl", { class: "facts" }, ...facts.map(([title, value]) => element("div", {}, element("dt", {}, title), element("dd", {}, value)))),
    record.notes ? element("p", { class: "notes" }, record.notes) : "",
  );
}

function rankMetric(name) {
  const place = PREFERRED.indexOf(name.split("/").pop());
  return place < 0 ? PREFERRED.length : place;
}

async function showCurves(section, scope, runId, refresh) {
  const grid = element("div", { class: "grid" });
  const more = element("button", { hidden: true }, "Show all metrics");
  const empty = element("p", { class: "dim", hidden: true }, "No metrics yet.");
  section.append(element("h2", {}, "Curves"), empty, grid, more);
  const charts = new Map();
  let shown = FIRST_METRICS;

  const show = (name, points) => {
    let entry = charts.get(name);
    if (!entry) {
      const chart = new Chart(name, scope);
      entry = { chart, points: [] };
      charts.set(name, entry);
      grid.append(chart.root);
    }
    entry.points = points;
    draw(entry);
  };
  const draw = ({ chart, points }) => {
    const last = points.length ? points[points.length - 1] : null;
    chart.latest.textContent = last ? `${formatNumber(last[1])} at ${formatNumber(last[0])}` : "";
    chart.setSeries([{ label: "", color: COLORS[0], points }]);
  };

  async function loadSeries() {
    const metrics = await scope.read(runPath(runId, "/metrics"));
    const names = Object.keys(metrics).filter((name) => name.length <= MAX_NAME);
    names.sort((a, b) => rankMetric(a) - rankMetric(b) || (a < b ? -1 : 1));
    more.hidden = names.length <= shown;
    more.textContent = names.length > MAX_METRICS ? `Show ${MAX_METRICS} of ${names.length} metrics` : `Show all ${names.length} metrics`;
    empty.hidden = names.length > 0;
    const wanted = names.slice(0, shown);
    if (!wanted.length) return;
    const series = await scope.read(runPath(runId, "/metrics/series"), { name: wanted, points: STORED_POINTS });
    for (const name of wanted) show(name, series[name] || []);
    grid.dataset.loaded = "yes";
  }

  // Points that arrive before the history is loaded are part of it.
  let loading = null;
  const reload = () => {
    loading = loadSeries().catch((error) => {
      if (!scope.isClosed) empty.textContent = error.message;
    }).finally(() => { loading = null; });
    return loading;
  };
  more.addEventListener("click", () => {
    shown = MAX_METRICS;
    more.hidden = true;
    reload();
  });
  const append = (points) => {
    for (const [name, added] of Object.entries(points)) {
      const entry = charts.get(name);
      if (!entry) {
        if (charts.size < shown && name.length <= MAX_NAME) show(name, added);
        continue;
      }
      const last = entry.points.length ? entry.points[entry.points.length - 1][0] : -Infinity;
      entry.points = entry.points.concat(added.filter(([step]) => step > last));
      if (entry.points.length > MAX_POINTS) entry.points = thin(entry.points);
      draw(entry);
    }
    empty.hidden = charts.size > 0;
    section.dataset.live = Number(section.dataset.live || 0) + 1;
  };
  scope.stream(`/stream/metrics?run=${encodeURIComponent(runId)}`, {
    history: reload,
    points: async ({ points }) => {
      await loading;
      if (!scope.isClosed) append(points);
    },
    run_end: () => refresh().catch(() => {}),
  });
}

// Half of the points: of each four neighbours the lowest and the highest.
export function thin(points) {
  const kept = [];
  for (let start = 0; start < points.length; start += 4) {
    const part = points.slice(start, start + 4);
    const finite = part.filter(([, value]) => isNumber(value)).sort((a, b) => a[1] - b[1]);
    const ends = finite.length > 1 ? [finite[0], finite[finite.length - 1]] : part.slice(0, 1);
    kept.push(...ends.sort((a, b) => a[0] - b[0]));
  }
  return kept;
}

async function showLog(section, scope, runId, live) {
  const box = element("pre", { class: "output", tabIndex: 0, "aria-label": "Output of the run" });
  section.append(element("h2", {}, "Output"), box);
  let offset = -LOG_TAIL_BYTES, rest = "";
  scope.repeat(1, async () => {
    const isLast = !live();
    const chunk = await scope.read(runPath(runId, "/log"), { offset });
    if (offset < 0 && chunk.size > LOG_TAIL_BYTES) box.append(element("span", { class: "dim" }, `… the last ${formatBytes(LOG_TAIL_BYTES)} of ${formatBytes(chunk.size)}\n`));
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (chunk.text) {
      // A carriage return replaces the line so far, as progress bars do.
      const text = (rest + chunk.text).replace(/\r\n/g, "\n").replace(/[^\n]*\r/g, "").replace(CONTROL, "");
      box.append(text);
      let length = box.textContent.length;
      while (length > MAX_LOG_CHARACTERS && box.childNodes.length > 1) {
        length -= box.firstChild.textContent.length;
        box.firstChild.remove();
      }
      if (isAtEnd) box.scrollTop = box.scrollHeight;
    }
    const isComplete = chunk.offset === offset || chunk.offset >= chunk.size;
    offset = chunk.offset;
    if (!box.textContent && chunk.ended) box.append(element("span", { class: "dim" }, "The run wrote no output."));
    // Slow down with a run that has ended; a resume continues it in another attempt.
    return !(chunk.ended && isLast && isComplete);
  });
}

async function showFiles(section, scope, runId) {
  const optional = (path, query) => scope.read(path, query).catch((error) => {
    if (error.name === "AbortError") throw error;
    return [];
  });
  const [checkpoints, videos, episodes] = await Promise.all([
    optional("/checkpoints", { run: runId }),
    optional(runPath(runId, "/videos")),
    optional(runPath(runId, "/trajectories"), { limit: 1 }),
  ]);
  if (checkpoints.length) {
    const rows = checkpoints.slice(0, 50).map((one) => [
      one.checkpoint_id, one.env_step, one.best ? "best" : "", one.metric, formatBytes(one.size_bytes), formatTime(one.created), one.format,
    ]);
    section.append(element("h2", {}, `Checkpoints (${checkpoints.length})`), buildTable(["id", "step", "", "metric", "size", "created", "format"], rows));
  }
  if (videos.length) {
    const clips = videos.slice(0, 12).map((clip) => {
      const source = runPath(runId, `/videos/${quotePath(clip.name)}`);
      const isPicture = clip.name.endsWith(".gif");
      const player = isPicture ? element("img", { src: source, loading: "lazy", alt: clip.name }) : element("video", { src: source, controls: true, preload: "metadata", loop: true, muted: true });
      return element("figure", {}, player, element("figcaption", {}, clip.name));
    });
    section.append(element("h2", {}, `Videos (${videos.length})`), element("div", { class: "grid clips" }, ...clips));
  }
  if (episodes.length) {
    section.append(element("h2", {}, "Screen episodes"), element("p", {}, element("a", { href: `#${runPath(runId, "/trajectories")}` }, "Open the trajectory viewer")));
  }
}

async function showDetails(section, scope, runId) {
  const load = (path) => scope.read(runPath(runId, path)).catch(() => null);
  const [resolved, command, life] = await Promise.all([load("/resolved"), load("/command"), load("/life")]);
  const fold = (title, content) => section.append(element("details", {}, element("summary", {}, title), content));
  if (resolved && Object.keys(resolved).length) {
    const rows = [...flatten(resolved)].map(([key, value]) => [key, formatValue(value)]);
    fold("Configuration", buildTable(["key", "value"], rows, "keys"));
  }
  if (command && Object.keys(command).length) fold("Command", element("pre", {}, JSON.stringify(command, null, 2)));
  if (life?.length) {
    const rows = life.map((event) => [formatTime(event.time), String(event.kind).replaceAll("_", " "), event.reason || ""]);
    fold("Events", buildTable(["time", "event", "reason"], rows));
  }
}

export function* flatten(value, prefix = "") {
  for (const [key, item] of Object.entries(value)) {
    if (item !== null && typeof item === "object" && !Array.isArray(item) && Object.keys(item).length) yield* flatten(item, `${prefix}${key}.`);
    else yield [`${prefix}${key}`, item];
  }
}
