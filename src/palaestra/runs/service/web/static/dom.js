// Elements and formatted values. Text is only ever inserted as text nodes, so nothing that a run contains can be markup.

export function element(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") || name === "role" || name === "for") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A function that draws in the next frame, however often it is called before.
export function oncePerFrame(draw) {
  let isPending = false;
  return () => {
    if (isPending) return;
    isPending = true;
    requestAnimationFrame(() => {
      isPending = false;
      draw();
    });
  };
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function formatNumber(value) {
  if (value === null || value === undefined) return "";
  if (!isNumber(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function formatRange(low, high) {
  return isNumber(low) && isNumber(high) ? `[${formatNumber(low)}, ${formatNumber(high)}]` : "";
}

export function formatDuration(seconds) {
  if (!isNumber(seconds)) return "";
  const total = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
}

export function formatTime(seconds) {
  if (!seconds) return "";
  const pad = (number) => String(number).padStart(2, "0");
  const date = new Date(seconds * 1000);
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

export function formatBytes(bytes) {
  if (!isNumber(bytes)) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let index = 0, value = bytes;
  for (; value >= 1000 && index < units.length - 1; index += 1) value /= 1000;
  return `${index ? value.toPrecision(3) : value} ${units[index]}`;
}

export function formatValue(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return formatNumber(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

// Ids of a sweep differ at their end, which a table would cut off.
export function shortenMiddle(text, length = 36) {
  if (text.length <= length) return text;
  const head = Math.ceil((length - 1) / 2);
  return `${text.slice(0, head)}…${text.slice(head + 1 - length)}`;
}

export function phaseMark(phase) {
  return element("span", { class: `phase phase-${phase}` }, phase);
}

export const isLive = (record) => ["queued", "starting", "running", "stopping"].includes(record.phase);

export function elapsed(record) {
  return record.started === null ? null : (record.ended || Date.now() / 1000) - record.started;
}

export function runLink(runId, text) {
  return element("a", { href: `#/runs/${encodeURIComponent(runId)}` }, text || runId);
}

// A table from titles and rows of cells; numbers are aligned to the right.
export function buildTable(titles, rows, className = "") {
  const isNumeric = titles.map((_, index) => rows.some((row) => isNumber(row[index])));
  const cell = (tag, value, index) => {
    const content = value instanceof Node ? value : formatValue(value === "" ? " " : value);
    return element(tag, { class: isNumeric[index] ? "number" : "" }, content);
  };
  const head = element("tr", {}, ...titles.map((title, index) => cell("th", title, index)));
  const body = rows.map((row) => element("tr", {}, ...row.map((value, index) => cell("td", value, index))));
  const table = element("table", { class: className }, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "wide" }, table);
}
