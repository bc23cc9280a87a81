"use strict";
// Who was in which generation, over time. Drag to zoom, double-click to see all; the keys + - 0 and
// the arrows do the same. Every rectangle is drawn again at each change of the view: there are few.

const MARKS = {
  fault: ["M0 -6 L5.5 4.5 L-5.5 4.5 Z", "fault"],
  drain: ["M0 -5.5 L5.5 0 L0 5.5 L-5.5 0 Z", "drain: a node joins or leaves"],
  save: ["M-4.5 -4.5 H4.5 V4.5 H-4.5 Z", "a save failed"],
  state: ["M0 -5 A5 5 0 1 1 -0.01 -5 Z", "states differed"],
  end: ["M-1.5 -6 H1.5 V6 H-1.5 Z", "the end"],
};
// What lies between two generations where the later one does not follow at once.
const GAPS = {
  stop: { line: "pause-line", short: "stopped", words: "stopped as asked" },
  down: { line: "down-line", short: "no group", words: "no group was there" },
};
const SHORTEST = 0.5; // seconds that the view may show
const LEFT = 150, TOP = 22, STRIP = 26, LANE = 15, GAP = 7, SAVES = 18;

// The same with its times as seconds after the beginning, and with each mark in its node's lane.
function relative(timeline) {
  // Another node's clock may be a little behind.
  const after = (time) => (time === null ? null : Math.max(0, time - timeline.began_s));
  const ends = after(timeline.ends_s);
  const lanes = timeline.lanes.map((lane) => lane.name);
  const marks = timeline.marks.map(({ time, node, kind, text }) => {
    const lane = lanes.indexOf(node);
    return { at: Math.min(after(time), ends), lane: lane < 0 ? null : lane, kind, text: lane < 0 && node ? `${node}: ${text}` : text };
  });
  const generations = timeline.generations.map((each, index) => ({
    ...each, number: each.generation, gap: index + 1 < timeline.generations.length ? each.gap : "",
    begins: after(each.begins_s), trains: after(each.trains_s), trained: after(each.trained_s), ends: after(each.ends_s),
  }));
  return { ...timeline, ends, marks, generations, commits: timeline.commits_s.map(after) };
}

class TimelineView {
  constructor(picture, view, onView) {
    this.picture = picture;
    this.shown = relative(picture.timeline);
    this.view = view; // {from, to} in seconds, or null for all
    this.onView = onView;
    this.id = `clip-${(TimelineView.count = (TimelineView.count || 0) + 1)}`; // of this drawing in the page
    this.commits = this.shown.commits;
    this.svg = shape("svg", { class: "timeline", tabindex: "0", role: "img" });
    this.reset = element("button", { type: "button", class: "reset", hidden: "" }, "show all");
    this.reset.addEventListener("click", () => this.show(null));
    this.svg.addEventListener("pointermove", (event) => this.moved(event));
    this.svg.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.left(); });
    // A tap: the finger has left by then, and what it touched is told until the next one.
    this.svg.addEventListener("click", (event) => { if (event.pointerType === "touch") this.moved(event); });
    this.svg.addEventListener("pointerdown", (event) => this.pressed(event));
    this.svg.addEventListener("pointerup", (event) => this.released(event));
    this.svg.addEventListener("pointercancel", () => { this.from = undefined; this.left(); });
    this.svg.addEventListener("dblclick", () => this.show(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  get first() { return this.shown.generations[0].begins; } // of those that are drawn
  get from_() { return this.view ? this.view.from : this.first; }
  get to_() { return this.view ? this.view.to : Math.max(this.shown.ends, this.first + 0.001); }

  x(seconds) { return this.left_ + ((seconds - this.from_) / (this.to_ - this.from_)) * (this.width - this.left_ - 6); }
  at(x) {
    const share = (x - this.left_) / (this.width - this.left_ - 6);
    return this.from_ + Math.min(1, Math.max(0, share)) * (this.to_ - this.from_);
  }

  show(view) {
    if (view && view.to - view.from < SHORTEST) return;
    this.view = view;
    this.onView(view);
    this.draw();
  }

  draw() {
    this.width = Math.max(280, this.svg.parentNode.clientWidth);
    this.left_ = this.width < 600 ? 84 : LEFT;
    const lanes = this.shown.lanes.length;
    this.bottom = TOP + STRIP + GAP + lanes * (LANE + 3) + (this.commits.length ? SAVES : 0);
    const height = this.bottom + 4;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.svg.setAttribute("height", height);
    const { num_generations, num_nodes } = this.shown;
    this.svg.setAttribute("aria-label", `${counted(num_generations, "generation")} on ${counted(num_nodes, "node")} over ${duration(this.shown.ends)}`);
    this.clip = shape("clipPath", { id: this.id }, shape("rect", { x: this.left_, y: 0, width: this.width - this.left_, height }));
    this.hair = shape("line", { class: "hair", y1: TOP - 4, y2: this.bottom, visibility: "hidden" });
    this.picked = shape("rect", { class: "picked", y: TOP, height: this.bottom - TOP, visibility: "hidden" });
    const body = shape("g", { "clip-path": `url(#${this.id})` }, ...this.tracks(), ...this.lanes(), ...this.strip(), ...this.saves(), ...this.marks(), this.picked, this.hair);
    this.svg.replaceChildren(shape("defs", {}, this.clip), ...this.axis(), ...this.names(), body);
    this.reset.hidden = this.view === null;
  }

  laneY(index) { return TOP + STRIP + GAP + index * (LANE + 3); }
  isSeen(begins, ends) { return ends >= this.from_ && begins <= this.to_; }

  box(kind, begins, ends, y, height, extra = {}) {
    const from = this.x(Math.max(begins, this.from_)), to = this.x(Math.min(ends, this.to_));
    return shape("rect", { class: kind, x: from.toFixed(2), y, width: Math.max(0.8, to - from).toFixed(2), height, ...extra });
  }

  axis() {
    const ticks = timeTicks(this.from_, this.to_, (this.width - this.left_) / 95);
    const every = ticks.length > 1 ? ticks[1] - ticks[0] : 60;
    return ticks.flatMap((at) => {
      const x = this.x(at).toFixed(1);
      return [shape("line", { class: "grid", x1: x, x2: x, y1: TOP - 4, y2: this.bottom }),
        shape("text", { x, y: 12, "text-anchor": this.x(at) > this.width - 34 ? "end" : "middle" }, moment(at, every))];
    });
  }

  names() {
    const text = (y, words, kind) => shape("text", { x: 0, y, class: kind }, fitting(words, this.left_ - 12), shape("title", {}, words));
    const found = [text(TOP + STRIP / 2 + 4, "group", "name")];
    this.shown.lanes.forEach((lane, index) => {
      found.push(text(this.laneY(index) + LANE - 3, lane.name, ""));
    });
    if (this.commits.length) found.push(text(this.bottom - 4, "saves", ""));
    return found;
  }

  tracks() {
    const width = this.width - this.left_;
    return this.shown.lanes.map((_, index) => shape("rect", { class: "track", x: this.left_, y: this.laneY(index), width, height: LANE }));
  }

  // The whole group: it trains in a generation from its first step that counts to its last one.
  strip() {
    const found = [];
    this.shown.generations.forEach((each, index) => {
      const hidden = !this.isSeen(each.begins, (this.shown.generations[index + 1] || { begins: each.ends }).begins);
      const trains = each.trains ?? each.ends, trained = each.trained ?? each.ends;
      const own = shape("g", { class: "generation-group", "data-number": each.number });
      if (!hidden) {
        if (trains > each.begins) own.append(this.box("lost", each.begins, trains, TOP, STRIP));
        if (each.trained !== null) own.append(this.box(index % 2 ? "generation odd" : "generation", trains, trained, TOP, STRIP));
        if (each.ends > trained) own.append(this.box("lost", trained, each.ends, TOP, STRIP));
        const next = this.shown.generations[index + 1];
        own.append(...this.why(each, this.shown.generations[index - 1]));
        if (next && each.gap && next.begins > each.ends) own.append(this.gap(each.gap, each.ends, next.begins));
        const from = this.x(Math.max(trains, this.from_)), to = this.x(Math.min(trained, this.to_));
        if (to - from > 14 + 6 * String(each.number).length) own.append(shape("text", { class: "count", x: (from + to) / 2, y: TOP + STRIP / 2 + 4, "text-anchor": "middle" }, String(each.number)));
      }
      found.push(own);
    });
    return found;
  }

  // The cause, in the time that was lost to it, if there is room.
  why(each, before) {
    const begins = before && !before.gap ? before.trained ?? before.ends : each.begins;
    const from = this.x(Math.max(begins, this.from_)), to = this.x(Math.min(each.trains ?? each.ends, this.to_));
    if (to - from < 16 + 6 * each.cause.length) return [];
    return [shape("text", { class: "why", x: (from + to) / 2, y: TOP + STRIP / 2 + 4, "text-anchor": "middle" }, each.cause)];
  }

  // Between two generations nothing was there: as asked, by a fault, or nothing that is drawn.
  gap(kind, begins, ends) {
    const y = TOP + STRIP / 2;
    const { line, short } = GAPS[kind];
    const from = this.x(Math.max(begins, this.from_)), to = this.x(Math.min(ends, this.to_));
    const words = to - from < 20 + 6.4 * short.length ? [] : [
      shape("rect", { class: "pause", x: (from + to) / 2 - 3.3 * short.length, y: y - 8, width: 6.6 * short.length, height: 16 }),
      shape("text", { class: "gap-words", x: (from + to) / 2, y: y + 4, "text-anchor": "middle" }, short)];
    return shape("g", { class: "gap", "data-kind": kind }, this.box("pause", begins, ends, TOP, STRIP),
      shape("line", { class: line, x1: from, x2: to, y1: y, y2: y }), ...words);
  }

  lanes() {
    const { generations, lanes } = this.shown;
    const found = [];
    lanes.forEach((lane, index) => {
      const y = this.laneY(index);
      for (const [from, to] of this.unbroken(lane.in)) {
        const begins = generations[from].begins, ends = generations[to].ends;
        if (this.isSeen(begins, ends)) found.push(this.box("in", begins, ends, y, LANE));
      }
    });
    const bottom = this.laneY(lanes.length) - 3;
    generations.forEach((each, index) => {
      const x = this.x(each.begins);
      const width = this.x(each.ends) - x;
      if (index && width > 3 && this.isSeen(each.begins, each.begins)) found.push(shape("line", { class: "edge", x1: x, x2: x, y1: TOP + STRIP + GAP, y2: bottom }));
    });
    return found;
  }

  // Those of these generations that follow each other without a gap, as [first, last].
  unbroken(places) {
    const parts = [];
    for (const at of places) {
      const part = parts[parts.length - 1];
      if (part && part[1] === at - 1 && !this.shown.generations[at - 1].gap) part[1] = at;
      else parts.push([at, at]);
    }
    return parts;
  }

  saves() {
    const y = this.bottom - SAVES + 4;
    let drawn = -9;
    return this.commits.filter((at) => this.isSeen(at, at)).map((at) => this.x(at)).filter((x) => {
      if (x - drawn < 2.5) return false;
      drawn = x;
      return true;
    }).map((x) => shape("line", { class: "saved", x1: x, x2: x, y1: y, y2: y + 11 }));
  }

  marks() {
    const seen = this.shown.marks.filter((mark) => this.isSeen(mark.at, mark.at));
    const size = seen.length > 80 ? 0.6 : 1; // many small ones can still be told apart
    return seen.map((mark) => {
      const y = mark.lane === null ? TOP + STRIP / 2 : this.laneY(mark.lane) + LANE / 2;
      return shape("path", { class: `mark ${mark.kind}`, d: MARKS[mark.kind][0], transform: `translate(${this.x(mark.at).toFixed(1)} ${y}) scale(${size})` });
    });
  }

  // What is under the pointer.

  position(event) {
    const box = this.svg.getBoundingClientRect();
    return [((event.clientX - box.left) * this.width) / box.width, event.clientY - box.top];
  }

  moved(event) {
    const [x, y] = this.position(event);
    if (x < this.left_) return this.left();
    this.hair.setAttribute("x1", x);
    this.hair.setAttribute("x2", x);
    this.hair.setAttribute("visibility", "visible");
    if (this.from !== undefined) {
      this.picked.setAttribute("x", Math.min(x, this.from));
      this.picked.setAttribute("width", Math.abs(x - this.from));
      this.picked.setAttribute("visibility", "visible");
    }
    showTip(event, this.words(x, y, event.pointerType === "touch" ? 16 : 7)); // a finger is wide
  }

  words(x, y, reach) {
    const at = this.at(x);
    const { began_s, generations, marks } = this.shown;
    const found = [[`${duration(at)}, ${clockTime(began_s + at, true)}`, "dim"]];
    const index = generations.findLastIndex((each) => each.begins <= at);
    if (index >= 0) found.push(...this.generationWords(index, at));
    const near = marks.filter((mark) => Math.abs(this.x(mark.at) - x) < reach);
    const inLane = near.filter((mark) => mark.lane !== null && Math.abs(this.laneY(mark.lane) + LANE / 2 - y) < LANE);
    const told = inLane.length ? inLane : near;
    for (const mark of told.slice(0, 4)) found.push([mark.text, ""]);
    if (told.length > 4) found.push([`and ${told.length - 4} more`, "dim"]);
    return found;
  }

  generationWords(index, at) {
    const each = this.shown.generations[index];
    if (at > each.ends && each.gap) {
      const took = this.shown.generations[index + 1].begins - each.ends;
      return [[`${GAPS[each.gap].words} for ${duration(took)}`, "b"]];
    }
    const steps = each.first_step === null ? "no step" : `steps ${grouped(each.first_step)} to ${grouped(each.last_step)}`;
    const words = [[`generation ${each.number}: ${each.cause}`, "b"], [`${each.world_size} ${each.world_size === 1 ? "worker" : "workers"} on ${each.num_nodes} ${each.num_nodes === 1 ? "node" : "nodes"}, ${steps}`, ""]];
    const trains = each.trains ?? each.ends, trained = each.trained ?? each.ends;
    const next = this.shown.generations[index + 1];
    if (at < trains) words.push([`${duration(trains - each.begins)} before its first step that counts`, ""]);
    else if (at > trained) words.push([`${duration(each.ends - trained)} after its last step that counts${next ? `, lost to ${next.cause}` : ""}`, ""]);
    return words;
  }

  left() {
    if (this.hair) this.hair.setAttribute("visibility", "hidden");
    hideTip();
  }

  pressed(event) {
    const [x] = this.position(event);
    if (event.button !== 0 || x < this.left_ || event.pointerType === "touch") return;
    this.from = x;
    this.svg.setPointerCapture(event.pointerId);
  }

  released(event) {
    const from = this.from;
    this.from = undefined;
    if (from === undefined) return;
    const [x] = this.position(event);
    this.picked.setAttribute("visibility", "hidden");
    if (Math.abs(x - from) > 5) this.show({ from: this.at(Math.min(x, from)), to: this.at(Math.max(x, from)) });
  }

  key(event) {
    const size = this.to_ - this.from_, middle = (this.from_ + this.to_) / 2;
    const moves = { "+": [middle, size / 2], "=": [middle, size / 2], "-": [middle, size * 2], ArrowLeft: [middle - size / 4, size], ArrowRight: [middle + size / 4, size], 0: [0, Infinity] };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [center, wanted] = moves[event.key];
    if (wanted >= this.shown.ends - this.first) return this.show(null);
    const from = Math.min(Math.max(this.first, center - wanted / 2), this.shown.ends - wanted);
    this.show({ from, to: from + wanted });
  }
}

function fitting(words, width) {
  const most = Math.floor(width / 6.6);
  return words.length <= most ? words : `${words.slice(0, most - 1)}…`;
}

function timelineKey(view) {
  const present = new Set(view.shown.marks.map((mark) => mark.kind));
  const sign = (drawn, words) => element("span", {}, shape("svg", { viewBox: "-6 -6 12 12", "aria-hidden": "true" }, drawn), words);
  const found = [sign(shape("rect", { class: "train", x: -6, y: -5, width: 12, height: 10 }), "training"), sign(shape("rect", { class: "lost", x: -6, y: -5, width: 12, height: 10 }), "lost")];
  if (view.commits.length) found.push(sign(shape("line", { class: "saved", x1: 0, x2: 0, y1: -6, y2: 6 }), "checkpoint"));
  const gaps = new Set(view.shown.generations.map((each) => each.gap));
  for (const [kind, { line, words }] of Object.entries(GAPS)) {
    if (gaps.has(kind)) found.push(sign(shape("line", { class: line, x1: -6, x2: 6, y1: 0, y2: 0 }), words));
  }
  for (const [kind, [path, words]] of Object.entries(MARKS)) {
    if (present.has(kind)) found.push(sign(shape("path", { class: `mark ${kind}`, d: path }), words));
  }
  return element("div", { class: "key" }, ...found);
}
