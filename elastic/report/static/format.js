"use strict";
// Numbers with their units, and elements whose text is always text: nothing here parses markup.

const SPACE = "\u202f"; // a narrow one that does not break

function grouped(number) {
  const text = String(Math.round(number));
  return Math.abs(number) >= 10000 ? text.replace(/\B(?=(\d{3})+$)/g, SPACE) : text;
}

function counted(number, one) {
  return `${grouped(number)} ${one}${number === 1 ? "" : "s"}`;
}

function significant(number, digits = 4) {
  if (number === null || number === undefined) return "–";
  const size = Math.abs(number);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return number.toExponential(2).replace("e+", "e");
  if (size >= 10000) return grouped(number);
  return String(Number(number.toPrecision(digits)));
}

// In the two largest units, as picture/words.py writes them.
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)}${SPACE}ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)}${SPACE}s`;
  const whole = Math.round(seconds);
  for (const [size, unit, smallerSize, smaller] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole < size) continue;
    const rest = Math.round((whole % size) / smallerSize);
    if (rest * smallerSize === size) return `${Math.floor(whole / size) + 1}${SPACE}${unit}`;
    return `${Math.floor(whole / size)}${SPACE}${unit}` + (rest ? `\u00a0${rest}${SPACE}${smaller}` : "");
  }
  return `${whole}${SPACE}s`;
}

// Of a step: three digits, which say more than the unit's name.
function stepSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 100) return duration(seconds);
  if (seconds === 0 || seconds >= 1) return `${Number(seconds.toPrecision(3))}${SPACE}s`;
  return `${Number((seconds * 1000).toPrecision(3))}${SPACE}ms`;
}

function bytes(number) {
  if (number === null) return "–";
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (number >= size) return `${significant(number / size, 3)}${SPACE}${unit}`;
  }
  return `${number}${SPACE}B`;
}

function percent(share) {
  return share === null ? "–" : `${(share * 100).toFixed(share < 0.0995 ? 2 : 1)}${SPACE}%`;
}

function clockTime(seconds, withDay) {
  const options = { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false };
  if (withDay) Object.assign(options, { day: "numeric", month: "short" });
  return new Date(seconds * 1000).toLocaleString("en-GB", options);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function section(id, title, aside, ...children) {
  const top = element("div", { class: "top" }, element("h2", {}, title), aside ? element("span", { class: "aside" }, aside) : null);
  return element("section", { id, "aria-label": title }, top, ...children);
}

function table(attributes, columns, rows) {
  const cell = (kind, [text, isNumber]) => element(kind, isNumber ? { class: "number" } : {}, text);
  const head = element("tr", {}, ...columns.map((column) => cell("th", column)));
  const body = rows.map((row) => element("tr", {}, ...row.map((text, at) => cell("td", [text, columns[at][1]]))));
  return element("table", attributes, element("thead", {}, head), element("tbody", {}, ...body));
}

// A moment of the run on an axis whose ticks are `every` seconds apart: two ticks never say the same.
function moment(at, every) {
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  if (at === 0) return "0";
  if (at >= 86400 && every < 3600) return `${Math.floor(at / 86400)}${SPACE}d ${Math.floor((at % 86400) / 3600)}:${two((at % 3600) / 60)}${every < 60 ? `:${two(at % 60)}` : ""}`;
  if (at >= 3600 && every < 60) return `${Math.floor(at / 3600)}:${two((at % 3600) / 60)}:${every < 1 ? (at % 60).toFixed(1).padStart(4, "0") : two(at % 60)}`;
  if (at >= 60 && every < 1) return `${Math.floor(at / 60)}:${(at % 60).toFixed(1).padStart(4, "0")}`;
  if (every < 1) return `${at.toFixed(1)}${SPACE}s`;
  return duration(at);
}

// Ticks at round distances; times are round in seconds, minutes, hours and days.
function timeTicks(from, to, most) {
  const sizes = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];
  const wanted = (to - from) / Math.max(1, most);
  const every = sizes.find((size) => size >= wanted) || Math.ceil(wanted / 864000) * 864000;
  const ticks = [];
  for (let at = Math.ceil(from / every) * every; at <= to; at += every) ticks.push(Number(at.toFixed(3)));
  return ticks;
}
