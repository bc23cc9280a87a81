"use strict";
// The parts of the page, each from a picture. Every text of a run is set as text, never as markup.

const CAUSES = {
  start: "the start", failure: "failures", "node lost": "nodes lost", "node joined": "nodes that joined", "node left": "nodes that left",
  resume: "resumes", down: "no group was there", "between steps": "between steps: evaluations, saves", end: "after the last step",
};

// The variable of page.css that has the colour of a part of the time.
function causeColor(kind) {
  return kind in CAUSES ? `cause-${kind.replaceAll(" ", "-")}` : "cause-other";
}

function causeWords(kind, picture) {
  return kind === "end" && picture.state === "running" ? "since the last step" : CAUSES[kind] || kind;
}

function trainingWords(picture) {
  return picture.goodput === null ? "" : `${percent(picture.goodput)} of the time was training.`;
}

function timeParts(picture) {
  const lost = Object.entries(picture.badput_s).sort((a, b) => b[1] - a[1]);
  return [["training", picture.useful_s, "train"], ...lost.map(([kind, seconds]) => [kind, seconds, causeColor(kind)])];
}

// longest_s: the time that the whole width stands for.
function timeBar(picture, longest_s) {
  let x = 0;
  const shapes = timeParts(picture).map(([kind, seconds, color]) => {
    const width = (1000 * seconds) / (longest_s || 1);
    const part = shape("rect", { fill: `var(--${color})`, x, y: 0, width: Math.max(0.5, width - 1.5), height: 22 }, shape("title", {}, `${causeWords(kind, picture)}: ${duration(seconds)}`));
    x += width;
    return part;
  });
  return shape("svg", { class: "bar", viewBox: "0 0 1000 22", preserveAspectRatio: "none", role: "img", "aria-label": "where the time went" }, ...shapes);
}

function timeTable(picture) {
  const whole = picture.wall_s || 1;
  const swatch = (color, words) => {
    const own = element("i", { class: `swatch ${color}` });
    own.style.background = `var(--${color})`;
    return element("span", {}, own, words);
  };
  const rows = timeParts(picture).map(([kind, seconds, color]) => [swatch(color, causeWords(kind, picture)), duration(seconds), percent(seconds / whole)]);
  if (picture.paused_s) rows.push([swatch("cause-stop", "stopped as asked"), duration(picture.paused_s), "not counted"]);
  return table({ class: "causes" }, [["", false], ["time", true], ["share", true]], rows);
}

function figure(number, words) {
  return element("div", {}, number, element("span", {}, words));
}

function timeFigures(picture) {
  const { number, median_s, longest_s } = picture.recoveries;
  const found = [figure(grouped(number), number === 1 ? "recovery" : "recoveries")];
  found.push(figure(grouped(picture.lost_steps), picture.lost_steps === 1 ? "step was done again" : "steps were done again"));
  if (median_s !== null) found.push(figure(duration(median_s), number === 1 ? "took the recovery" : "took a recovery, median"));
  if (median_s !== null && number > 1) found.push(figure(duration(longest_s), "took the longest one"));
  return element("div", { class: "figures" }, ...found);
}

function timeSection(pictures) {
  if (pictures.every(({ picture }) => !picture.timeline)) return null;
  const longest_s = Math.max(...pictures.map(({ picture }) => picture.wall_s));
  const parts = pictures.flatMap(({ label, picture }) => [
    label ? element("p", { class: "run-label" }, element("b", {}, label), `${picture.headline} ${trainingWords(picture)}`) : null,
    timeBar(picture, longest_s),
    element("div", { class: "beside" }, element("div", { class: "scroll" }, timeTable(picture)), timeFigures(picture)),
  ]);
  return section("time", "Where the time went", pictures.length > 1 ? "both bars on one scale" : null, ...parts);
}

// A table of which only the first rows are on the page.
function rankedSection(kind, title, order, number, columns, rows, ...after) {
  const aside = rows.length < number ? `the ${rows.length} ${order} of ${grouped(number)}` : `the ${order} first`;
  const made = section(kind, title, aside, element("div", { class: "scroll" }, table({ class: `wide-table ${kind}` }, columns, rows)), ...after);
  made.classList.add("long");
  return made;
}

function faultsSection({ faults }) {
  if (!faults.number) return null;
  const rows = faults.newest.map((each) => [clockTime(each.time, true), each.node || "–", each.text]);
  return rankedSection("faults", "What went wrong", "newest", faults.number, [["time", false], ["node", false], ["what happened", false]], rows);
}

function timelineSection(pictures, views) {
  const drawn = pictures.filter(({ picture }) => picture.timeline);
  if (!drawn.length) return [null, []];
  const made = drawn.map(({ label, picture }, index) => {
    const view = new TimelineView(picture, views[index] || null, (next) => { views[index] = next; });
    return { label, picture, view };
  });
  const parts = made.flatMap(({ label, picture, view }) => {
    const { timeline } = picture;
    const numbers = {
      generations: timeline.num_generations - timeline.generations.length, nodes: timeline.num_nodes - timeline.lanes.length,
      marks: timeline.num_marks - timeline.marks.length, checkpoints: picture.checkpoints.committed - timeline.commits_s.length,
    };
    const left = Object.entries(numbers).filter(([, number]) => number).map(([kind, number]) => `${grouped(number)} ${kind}`);
    return [
      element("p", { class: "run-label" }, label ? element("b", {}, label) : null, `began ${clockTime(timeline.began_s, true)}, ${counted(timeline.num_generations, "generation")} on ${counted(timeline.num_nodes, "node")}. `, element("span", { class: "hint" }, "Drag to zoom. "), view.reset),
      element("div", {}, view.svg),
      timelineKey(view),
      left.length ? element("p", { class: "note" }, `The newest are drawn. Left out, for want of room: ${left.join(", ")}.`) : null,
    ];
  });
  return [section("timeline", "Who was in, and when", null, ...parts), made.map(({ view }) => view)];
}

function pairOf(pictures, find) {
  const colors = [{ color: "train" }, { color: "plan", dash: [6, 4] }];
  return pictures.map(({ label, picture }, index) => ({ series: find(picture), label, ...colors[index] })).filter((line) => line.series && line.series.at.length);
}

function logsSection(pictures, charts, parts) {
  const logged = ({ curves }) => [curves.loss, ...curves.logged].filter((series) => series);
  const names = [...new Set(pictures.flatMap(({ picture }) => logged(picture).map((series) => series.name)))];
  const figures = names.map((name, index) => {
    const lines = pairOf(pictures, (picture) => logged(picture).find((series) => series.name === name));
    return lines.length ? new StepChart(charts, name, lines, { wide: index === 0, parts }).figure : null;
  });
  if (!figures.some((figure) => figure)) return null;
  const key = pictures.length > 1 ? element("div", { class: "key" }, element("span", {}, element("i"), `A: ${pictures[0].picture.name}`), element("span", {}, element("i", { class: "b" }), `B: ${pictures[1].picture.name}`)) : null;
  const left = Math.max(...pictures.map(({ picture }) => picture.curves.names_left_out));
  const bucket = Math.max(1, ...pictures.flatMap(({ picture }) => logged(picture).map((series) => series.bucket)));
  const notes = [bucket > 1 ? `Of every ${grouped(bucket)} steps, each chart has the lowest and the highest value.` : "", left ? `${left} more names were logged; metrics.jsonl has them.` : ""].filter((words) => words);
  const note = notes.length ? element("p", { class: "note" }, notes.join(" ")) : null;
  const made = section("logged", "What the recipe logged", element("span", {}, "over steps", element("span", { class: "hint" }, "; drag to zoom, double-click for all")), key, element("div", { class: "charts" }, ...figures.filter((figure) => figure)), note);
  made.classList.add("long");
  return made;
}

function stepTimeSection(pictures, charts, parts) {
  const lines = pairOf(pictures, (picture) => picture.curves.step_s);
  if (!lines.length) return null;
  const figures = [new StepChart(charts, "step time", lines, { wide: true, isTime: true, parts, aside: pictures.length === 1 ? pictures[0].picture.facts["step time"] : "" }).figure];
  const [{ picture }] = pictures;
  const found = [];
  if (pictures.length === 1 && picture.curves.slowest_s) {
    const own = [{ series: picture.curves.slowest_s, color: "lost", label: "slowest rank" }, { series: picture.curves.others_s, color: "faint", label: "others" }].filter((line) => line.series);
    figures.push(new StepChart(charts, "slowest rank, and median of the others", own, { wide: true, isTime: true, over: picture.curves.step_s.at, aside: "their own work in each step, without waiting" }).figure);
    found.push(element("div", { class: "key" }, element("span", {}, element("i", { class: "slow" }), "slowest rank"), element("span", {}, element("i", { class: "others" }), "median of the others")));
  }
  return section("steps", "Step time", null, element("div", { class: "charts" }, ...figures), ...found);
}

const PHASES = [["detect_s", "detect", "detection"], ["rendezvous_s", "rendezvous", "rendezvous"], ["down_s", "down", "no node answered"], ["restore_s", "restore", "restore"], ["first_step_s", "first", "to the first new step"]];

function recoveriesSection(picture) {
  const { number, longest: ranked } = picture.recoveries;
  if (!number) return null;
  const sum = (recovery) => PHASES.reduce((total, [key]) => total + (recovery[key] || 0), 0);
  const took = (recovery) => (recovery.total_s === null ? sum(recovery) : recovery.total_s);
  const longest = Math.max(...ranked.map(took)) || 1;
  const bars = (each) => {
    // Before the phases that are known, an empty place for those that are not: nobody saw the end of all nodes.
    let x = Math.max(0, (took(each) - sum(each)) / longest) * 1000;
    const drawn = PHASES.map(([key, kind, words]) => {
      const seconds = each[key] || 0;
      const part = shape("rect", { class: `lost ${kind}`, x, y: 2, width: Math.max(0, (seconds / longest) * 1000 - 1), height: 10 }, shape("title", {}, `${words}: ${duration(seconds)}`));
      x += (seconds / longest) * 1000;
      return part;
    });
    return shape("svg", { class: "bars", viewBox: "0 0 1000 14", preserveAspectRatio: "none" }, ...drawn);
  };
  const rows = ranked.map((each) => [grouped(each.generation), each.why, each.source || "–", each.step === null ? "–" : grouped(each.step), grouped(each.lost_steps), each.total_s === null ? "no new step" : `${duration(each.total_s)}${each.tries > 1 ? ` in ${each.tries} tries` : ""}`, bars(each)]);
  const columns = [["generation", false], ["why", false], ["state from", false], ["back at step", true], ["lost steps", true], ["total", true], ["phases", false]];
  const key = element("div", { class: "key" }, ...PHASES.map(([, kind, words]) => element("span", {}, element("i", { class: `swatch ${kind}` }), words)));
  return rankedSection("recoveries", "Recoveries, by phase", "longest", number, columns, rows, key);
}

function checkpointsSection(picture) {
  if (!picture.timeline) return null;
  const { committed, failed, newest_step, size_bytes, seconds } = picture.checkpoints;
  const figures = element("div", { class: "figures" },
    figure(grouped(committed), `committed${failed ? `, ${grouped(failed)} failed` : ""}`),
    figure(newest_step === null ? "–" : `step ${grouped(newest_step)}`, "newest"), figure(bytes(size_bytes), "size"),
    figure(duration(seconds), "took, median"));
  return section("checkpoints", "Checkpoints", null, figures);
}

const TOLD_ABOVE = new Set(["state", "failed", "generation", "step", "loss", "last checkpoint", "goodput", "lost to", "step time", "checkpoints"]);

function factsSection(picture) {
  const shown = Object.entries(picture.facts).filter(([label]) => !TOLD_ABOVE.has(label));
  const rows = shown.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]);
  return rows.length ? section("facts", "Also in the report", null, element("dl", {}, ...rows)) : null;
}

function tracebackSection(picture) {
  return picture.traceback ? section("traceback", "Why it failed", "the newest worker that failed", element("pre", {}, picture.traceback)) : null;
}
