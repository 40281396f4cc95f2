// The table of runs. Only the visible rows are elements, so that thousands of runs scroll smoothly.

import { elapsed, element, formatDuration, formatNumber, formatTime, isLive, oncePerFrame, shortenMiddle } from "./dom.js";
import { showStatus } from "./service.js";

const FIRST_PAGE = 100, PAGE_SIZE = 500, EAGER_RUNS = 5000, OVERSCAN = 8, MAX_SELECTED = 50;
const LIVE_PHASES = ["queued", "starting", "running", "stopping"];

const COLUMNS = [
  { key: "run", title: "Run", value: (run) => (run.name || run.run_id).toLowerCase() },
  { key: "phase", title: "Phase", value: (run) => run.phase },
  { key: "env", title: "Environment", value: (run) => run.env_id.toLowerCase() },
  { key: "agent", title: "Agent", value: (run) => run.agent_id.toLowerCase() },
  { key: "steps", title: "Steps", value: (run) => run.env_step, isNumeric: true },
  { key: "return", title: "Return", value: (run) => run.episode_return, isNumeric: true },
  { key: "elapsed", title: "Elapsed", value: elapsed, isNumeric: true },
  { key: "created", title: "Created", value: (run) => run.created, isNumeric: true },
];

// Runs in the order of the service, as a sorted view.
export class RunList {
  constructor() {
    this.clear();
    this.sortKey = "";
    this.isDescending = true;
  }

  clear() {
    this.byId = new Map();
    this.order = [];
    this.view = [];
  }

  add(records, isFirst = false) {
    const added = records.filter((record) => !this.byId.has(record.run_id)).map((record) => record.run_id);
    for (const record of records) this.byId.set(record.run_id, record);
    this.order = isFirst ? [...added, ...this.order] : [...this.order, ...added];
    this.sort();
    return added.length;
  }

  remove(runId) {
    if (this.byId.delete(runId)) this.order = this.order.filter((other) => other !== runId);
    this.sort();
  }

  sort() {
    this.view = this.order.map((runId) => this.byId.get(runId));
    const column = COLUMNS.find(({ key }) => key === this.sortKey);
    if (!column) return;
    const sign = this.isDescending ? -1 : 1;
    const rank = (value) => (value === null || value === "" || Number.isNaN(value) ? 1 : 0);
    const keyed = this.view.map((record) => [column.value(record), record]);
    keyed.sort(([a], [b]) => rank(a) - rank(b) || (a < b ? -sign : a > b ? sign : 0));
    this.view = keyed.map(([, record]) => record);
  }
}

function buildRow(toggle) {
  const parts = {
    select: element("input", { type: "checkbox", onchange: () => toggle(row.dataset.run, parts.select.checked) }),
    link: element("a", {}),
    id: element("span", { class: "id" }),
    tags: element("span", { class: "tags" }),
    phase: element("span", {}),
    env: element("span", {}),
    agent: element("span", {}),
    steps: element("span", {}),
    meter: element("span", { class: "meter" }),
    return: element("span", {}),
    elapsed: element("span", {}),
    created: element("span", {}),
  };
  const cell = (key, ...children) => element("div", { class: `cell c-${key}`, role: "cell" }, ...children);
  const row = element("div", { class: "row", role: "row" },
    cell("select", parts.select), cell("run", parts.link, parts.id, parts.tags), cell("phase", parts.phase),
    cell("env", parts.env), cell("agent", parts.agent), cell("steps", parts.steps, parts.meter),
    cell("return", parts.return), cell("elapsed", parts.elapsed), cell("created", parts.created));
  row.parts = parts;
  return row;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function fillRow(row, record, index, isSelected) {
  const { parts } = row;
  row.dataset.run = record.run_id;
  row.setAttribute("aria-rowindex", index + 2);
  row.classList.toggle("odd", index % 2 === 1);
  parts.select.checked = isSelected;
  parts.select.setAttribute("aria-label", `Select ${record.run_id}`);
  parts.link.href = `#/runs/${encodeURIComponent(record.run_id)}`;
  parts.link.title = record.name ? `${record.name} (${record.run_id})` : record.run_id;
  setText(parts.link, `${record.favorite ? "★ " : ""}${record.name || shortenMiddle(record.run_id)}`);
  setText(parts.id, record.name ? record.run_id : "");
  // The id of a run of a sweep already begins with that of the sweep, so the tag would only take space.
  setText(parts.tags, record.tags.filter((tag) => !tag.startsWith("sweep:")).join(" · "));
  parts.tags.title = record.tags.join(" · ");
  setText(parts.phase, record.phase);
  parts.phase.className = `phase phase-${record.phase}`;
  parts.phase.title = record.reason;
  row.classList.toggle("alarm", record.alarms.length > 0);
  setText(parts.env, record.env_id);
  setText(parts.agent, record.agent_id);
  setText(parts.steps, record.env_step ? formatNumber(record.env_step) : "");
  const share = record.total_steps ? Math.min(1, record.env_step / record.total_steps) : 0;
  parts.meter.style.width = isLive(record) ? `${(share * 100).toFixed(1)}%` : "0";
  setText(parts.return, formatNumber(record.episode_return));
  setText(parts.elapsed, formatDuration(elapsed(record)));
  setText(parts.created, formatTime(record.created));
}

// Draws the rows of a list that are visible in a scrolled element.
class VirtualRows {
  constructor(list, isSelected, toggle, onEnd) {
    Object.assign(this, { list, isSelected, toggle, onEnd, pool: [], rowHeight: 34 });
    this.request = oncePerFrame(() => this.draw());
    this.sizer = element("div", { class: "sizer" });
    this.box = element("div", { class: "rows", role: "rowgroup", tabIndex: 0, onscroll: () => this.request() }, this.sizer);
  }

  watch(scope) {
    const observer = new ResizeObserver(() => this.request());
    observer.observe(this.box);
    scope.signal.addEventListener("abort", () => observer.disconnect());
  }

  draw() {
    const { view } = this.list;
    const height = this.box.clientHeight;
    this.rowHeight = parseFloat(getComputedStyle(this.box).getPropertyValue("--row")) || 34;
    this.sizer.style.height = `${view.length * this.rowHeight}px`;
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - OVERSCAN);
    const last = Math.min(view.length, Math.ceil((this.box.scrollTop + height) / this.rowHeight) + OVERSCAN);
    const size = Math.ceil(height / this.rowHeight) + 2 * OVERSCAN + 2;
    while (this.pool.length < size) {
      const row = buildRow(this.toggle);
      this.pool.push(row);
      this.sizer.append(row);
    }
    // A run keeps its row while it is visible: row number modulo the size of the pool.
    const used = new Set();
    for (let index = first; index < last; index += 1) {
      const row = this.pool[index % this.pool.length];
      used.add(row);
      fillRow(row, view[index], index, this.isSelected(view[index].run_id));
      row.style.transform = `translateY(${index * this.rowHeight}px)`;
      row.hidden = false;
    }
    for (const row of this.pool) if (!used.has(row)) row.hidden = true;
    if (last >= view.length - 2 * OVERSCAN) this.onEnd();
  }
}

export async function showRunTable(main, scope, parts, query) {
  main.className = "fill";
  const list = new RunList();
  const selected = new Set();
  let where = query.get("where") || "", sort = query.get("sort") || "";
  let hasMore = true, isLoading = false, wantsMore = false, generation = 0;

  const count = element("span", { class: "count", role: "status" });
  const problem = element("p", { class: "error", role: "alert", hidden: true });
  const compare = element("a", { class: "button", hidden: true }, "Compare");
  const whereInput = element("input", { type: "search", value: where, placeholder: "env=CartPole-v1 and return>400", "aria-label": "Filter", spellcheck: false });
  const sortInput = element("input", { type: "search", value: sort, placeholder: "sort by metric or key", "aria-label": "Sort by a metric or a configuration key", spellcheck: false });
  const form = element("form", { class: "filters", onsubmit: applyFilter, role: "search" }, whereInput, sortInput, element("button", {}, "Apply"), compare, count);

  const toggle = (runId, isOn) => {
    if (isOn && selected.size < MAX_SELECTED) selected.add(runId);
    else selected.delete(runId);
    compare.hidden = selected.size < 2;
    compare.textContent = `Compare ${selected.size}`;
    compare.href = `#/compare?${[...selected].map((id) => `run=${encodeURIComponent(id)}`).join("&")}`;
    rows.request();
  };
  const rows = new VirtualRows(list, (runId) => selected.has(runId), toggle, () => { wantsMore = true; loadMore(); });
  const head = element("div", { class: "row head", role: "row" }, element("div", { class: "cell c-select", role: "columnheader" }));
  for (const column of COLUMNS) {
    const button = element("button", { onclick: () => sortBy(column) }, column.title);
    head.append(element("div", { class: `cell c-${column.key}`, role: "columnheader", "aria-sort": "none" }, button));
  }
  main.append(form, problem, element("div", { class: "runs", role: "table", "aria-label": "Runs" }, head, rows.box));
  rows.watch(scope);

  function sortBy(column) {
    list.isDescending = list.sortKey === column.key ? !list.isDescending : Boolean(column.isNumeric);
    list.sortKey = column.key;
    for (const cell of head.children) {
      const isSorted = cell.classList.contains(`c-${column.key}`);
      cell.setAttribute("aria-sort", !isSorted ? "none" : list.isDescending ? "descending" : "ascending");
    }
    list.sort();
    rows.box.scrollTop = 0;
    rows.request();
  }

  function applyFilter(event) {
    event.preventDefault();
    where = whereInput.value.trim();
    sort = sortInput.value.trim();
    const address = new URLSearchParams({ ...(where && { where }), ...(sort && { sort }) }).toString();
    history.replaceState(null, "", address ? `#/?${address}` : "#/");
    list.clear();
    list.sortKey = "";
    for (const cell of head.children) cell.setAttribute("aria-sort", "none");
    rows.box.scrollTop = 0;
    hasMore = true;
    isLoading = false;
    generation += 1;
    load();
  }

  function update() {
    count.textContent = `${list.view.length.toLocaleString("en")}${hasMore ? "+" : ""} ${list.view.length === 1 && !hasMore ? "run" : "runs"}`;
    rows.request();
  }

  async function loadPage(mine) {
    const limit = list.order.length ? PAGE_SIZE : FIRST_PAGE;
    // A list that the service sorted has no next page: it is loaded at once.
    const page = sort ? { sort } : { limit, before: list.order[list.order.length - 1] };
    const records = await scope.read("/runs", { where, ...page });
    if (mine !== generation) return;
    hasMore = !sort && records.length === limit;
    list.add(records);
    update();
  }

  async function loadMore() {
    if (isLoading || !hasMore || scope.isClosed) return;
    isLoading = true;
    const mine = generation;
    try {
      do {
        wantsMore = false;
        await loadPage(mine);
      } while (mine === generation && hasMore && !scope.isClosed && (list.order.length < EAGER_RUNS || wantsMore));
      problem.hidden = true;
    } finally {
      if (mine === generation) isLoading = false;
    }
  }

  async function load() {
    try {
      await loadMore();
    } catch (error) {
      if (scope.isClosed || error.name === "AbortError") return;
      if (error.status === 401) throw error;
      hasMore = false;
      problem.hidden = false;
      problem.textContent = error.message;
      update();
    }
  }

  // Runs that live change; the others do not, and are read again only when an event names them.
  async function refreshLive() {
    if (isLoading) return;
    const mine = generation;
    const records = await scope.read("/runs", { where, phase: LIVE_PHASES }).catch((error) => {
      if (error.status === 422) return [];
      throw error;
    });
    if (mine !== generation) return;
    const before = list.view.filter(isLive).map((record) => record.run_id);
    const live = new Set(records.map((record) => record.run_id));
    list.add(records.filter((record) => !list.byId.has(record.run_id)), true);
    list.add(records);
    await refresh(before.filter((runId) => !live.has(runId)));
    update();
  }

  async function refresh(runIds) {
    for (const runId of runIds.slice(0, 50)) {
      try {
        const record = await scope.read(`/runs/${encodeURIComponent(runId)}`);
        if (list.byId.has(runId)) list.add([record]);
      } catch (error) {
        if (error.status !== 404) throw error;
        list.remove(runId);
      }
    }
  }

  const named = new Set();
  scope.stream("/stream", {
    run: ({ run_id: runId }) => {
      if (!named.size) {
        setTimeout(() => {
          const known = [...named].filter((id) => list.byId.has(id));
          named.clear();
          if (!scope.isClosed) refresh(known).then(refreshLive).catch((error) => showStatus(error.message));
        }, 300);
      }
      named.add(runId);
    },
  });
  await load();
  scope.repeat(3, refreshLive);
}
