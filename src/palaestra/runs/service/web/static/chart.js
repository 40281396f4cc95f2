// Curves on a canvas: lines, bands, ticks and the values under the pointer.

import { element, formatNumber, isNumber, oncePerFrame } from "./dom.js";

export const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#8a6bd1", "#7a7a7a"];
const HEIGHT = 220, LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 26;

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw);
  const ticks = [];
  for (let index = Math.ceil(low / step); index * step <= high + step * 1e-9; index += 1) ticks.push(index * step);
  return ticks;
}

function shortNumber(value) {
  const size = Math.abs(value);
  for (const [factor, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= factor) return `${Number((value / factor).toPrecision(3))}${suffix}`;
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  if (high < 0) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

export class Chart {
  // Series are {label, color, points: [[x, y], …], band: [[x, low, high], …]}, sorted by x; y may be missing.
  constructor(title, scope) {
    this.series = [];
    this.hover = null;
    this.request = oncePerFrame(() => this.draw());
    this.canvas = element("canvas", { height: HEIGHT, role: "img", "aria-label": `Curve of ${title}` });
    this.tip = element("div", { class: "tip", hidden: true });
    this.latest = element("span", { class: "latest" });
    this.root = element("figure", { class: "chart" },
      element("figcaption", {}, element("span", { class: "title", title }, title), this.latest),
      element("div", { class: "plot" }, this.canvas, this.tip));
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    const observer = new ResizeObserver(() => this.request());
    observer.observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.request(), { signal: scope.signal });
    scope.signal.addEventListener("abort", () => observer.disconnect());
  }

  setSeries(series) {
    this.series = series;
    this.request();
  }

  point(x, y) {
    this.hover = x === null ? null : [x, y];
    this.request();
  }

  range() {
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { points, band } of this.series) {
      const include = (value) => {
        if (isNumber(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
      };
      for (const [x, y] of points) {
        left = Math.min(left, x);
        right = Math.max(right, x);
        include(y);
      }
      for (const [, bottom, top] of band || []) {
        include(bottom);
        include(top);
      }
    }
    if (left === right) [left, right] = [left - 1, right + 1];
    const margin = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.05;
    return low === Infinity ? null : [left, right, low - margin, high + margin];
  }

  draw() {
    const width = this.canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    const style = getComputedStyle(this.root);
    const colors = { text: style.getPropertyValue("--dim"), grid: style.getPropertyValue("--line") };
    if (this.canvas.width !== Math.round(width * ratio)) this.canvas.width = Math.round(width * ratio);
    if (this.canvas.height !== Math.round(HEIGHT * ratio)) this.canvas.height = Math.round(HEIGHT * ratio);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, HEIGHT);
    context.font = `11px ${style.fontFamily}`;
    const range = this.range();
    if (range === null) {
      context.fillStyle = colors.text;
      context.fillText("no values yet", LEFT, HEIGHT / 2);
      return;
    }
    const [left, right, low, high] = range;
    const toX = (x) => LEFT + ((x - left) / (right - left)) * (width - LEFT - RIGHT);
    const toY = (y) => HEIGHT - BOTTOM - ((y - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    this.drawAxes(context, colors, range, width, toX, toY);
    for (const series of this.series) this.drawSeries(context, series, toX, toY);
    this.drawHover(context, colors, range, width, toX, toY);
  }

  drawAxes(context, colors, [left, right, low, high], width, toX, toY) {
    context.strokeStyle = colors.grid;
    context.fillStyle = colors.text;
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of niceTicks(low, high, 4)) {
      const y = Math.round(toY(tick)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width - RIGHT, y);
      context.stroke();
      context.fillText(shortNumber(tick), LEFT - 6, y);
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    for (const tick of niceTicks(left, right, Math.max(2, width / 110))) {
      context.fillText(shortNumber(tick), Math.min(toX(tick), width - 16), HEIGHT - BOTTOM + 8);
    }
  }

  drawSeries(context, { color, points, band }, toX, toY) {
    const inside = (band || []).filter(([, low, high]) => isNumber(low) && isNumber(high));
    if (inside.length > 1) {
      context.fillStyle = color;
      context.globalAlpha = 0.18;
      context.beginPath();
      inside.forEach(([x, low], index) => context[index ? "lineTo" : "moveTo"](toX(x), toY(low)));
      for (const [x, , high] of [...inside].reverse()) context.lineTo(toX(x), toY(high));
      context.fill();
      context.globalAlpha = 1;
    }
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    let isDown = false, drawn = 0;
    for (const [x, y] of points) {
      if (!isNumber(y)) { isDown = false; continue; }
      context[isDown ? "lineTo" : "moveTo"](toX(x), toY(y));
      isDown = true;
      drawn += 1;
    }
    context.stroke();
    if (drawn === 1) {
      const [x, y] = points.find(([, value]) => isNumber(value));
      context.fillStyle = color;
      context.fillRect(toX(x) - 2, toY(y) - 2, 4, 4);
    }
  }

  drawHover(context, colors, [left, right], width, toX, toY) {
    this.tip.hidden = this.hover === null;
    if (this.hover === null) return;
    const [pointerX, pointerY] = this.hover;
    const x = left + ((pointerX - LEFT) / (width - LEFT - RIGHT)) * (right - left);
    const lines = [];
    for (const { label, color, points, band } of this.series) {
      const point = nearest(points, x);
      if (point === null || !isNumber(point[1])) continue;
      const range = band && nearest(band, point[0]);
      const bounds = range && isNumber(range[1]) ? ` [${formatNumber(range[1])}, ${formatNumber(range[2])}]` : "";
      const line = element("div", {}, `${label ? `${label}: ` : ""}${formatNumber(point[1])}${bounds}`);
      if (this.series.length > 1) line.style.color = color;
      if (!lines.length) lines.push(element("div", { class: "dim" }, `step ${formatNumber(point[0])}`));
      lines.push(line);
      context.fillStyle = color;
      context.beginPath();
      context.arc(toX(point[0]), toY(point[1]), 3, 0, 7);
      context.fill();
    }
    this.tip.replaceChildren(...lines);
    const isRight = pointerX > width / 2;
    this.tip.style.left = isRight ? "auto" : `${pointerX + 14}px`;
    this.tip.style.right = isRight ? `${width - pointerX + 14}px` : "auto";
    this.tip.style.top = `${Math.min(pointerY, HEIGHT - 60)}px`;
  }
}
