"use strict";
// Draws the page from the picture in it, and in live mode from each newer one that the server has.

const POLL_MS = 2000;
const tip = document.getElementById("tip");

function showTip(event, words) {
  tip.replaceChildren(...words.map(([text, kind]) => element("p", kind === "dim" ? { class: "dim" } : {}, kind === "b" ? element("b", {}, text) : text)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  tip.style.left = `${Math.max(6, x)}px`;
  tip.style.top = `${Math.max(6, Math.min(event.clientY + 18, innerHeight - height - 6))}px`;
}

function hideTip() {
  tip.hidden = true;
}

function focusable(section) {
  return [...document.querySelectorAll(`#${section} :is(button, [tabindex])`)];
}

// Where the keys are: which section, and which of its elements that can have them.
function placeOf(node) {
  const section = node && node.closest("section");
  return section && { section: section.id, at: focusable(section.id).indexOf(node) };
}

class Page {
  constructor() {
    this.views = [];
    this.zoom = null;
    this.charts = [];
    this.timelines = [];
    this.isHeld = false; // a button of the pointer is down
    this.pointer = null; // its newest event
  }

  show(shown) {
    const pictures = shown.a ? [{ label: "A", picture: shown.a }, { label: "B", picture: shown.b }] : [{ label: "", picture: shown }];
    this.heading(shown, pictures);
    const before = this.charts;
    this.charts = [];
    this.charts.onZoom = (zoom) => this.zoomed(zoom);
    const parts = shown.first_difference || undefined;
    const [timeline, views] = timelineSection(pictures, this.views);
    this.timelines = views;
    const single = pictures.length === 1 ? shown : null;
    const sections = [
      single && tracebackSection(single), timeSection(pictures), single && faultsSection(single), timeline, logsSection(pictures, this.charts, parts),
      stepTimeSection(pictures, this.charts, parts), single && recoveriesSection(single), single && checkpointsSection(single), single && factsSection(single),
    ];
    this.put(sections.filter((each) => each), before);
  }

  // In place of what was there, for a reader who has scrolled, points at something or uses the keys.
  put(sections, charts) {
    const main = document.getElementById("main");
    const focused = placeOf(document.activeElement);
    const y = scrollY;
    // Charts that are not drawn yet have no height, and the page must not become shorter meanwhile.
    main.style.minHeight = `${main.offsetHeight}px`;
    for (const chart of charts) if (chart.plot) chart.plot.destroy();
    main.replaceChildren(...sections);
    this.draw();
    scrollTo(0, y);
    // uPlot sets its heights once this event is over.
    requestAnimationFrame(() => { main.style.minHeight = ""; });
    const again = focused && focusable(focused.section)[focused.at];
    if (again) again.focus({ preventScroll: true });
    const under = this.pointer && document.elementFromPoint(this.pointer.clientX, this.pointer.clientY);
    const view = this.timelines.find(({ svg }) => svg.contains(under));
    if (view) view.moved(this.pointer);
    else hideTip();
  }

  heading(shown, pictures) {
    const run = document.getElementById("run");
    const names = pictures.map(({ label, picture }) => element("span", {}, label ? `${label}: ${picture.name}` : picture.name));
    const state = shown.a ? null : element("span", { class: "state", "data-state": shown.state }, shown.state);
    run.replaceChildren(...(state ? [state] : []), ...names);
    const sign = shown.a || shown.last_sign_s === null ? "" : ` The last sign of life: ${clockTime(shown.last_sign_s, true)}.`;
    document.getElementById("headline").textContent = `${shown.headline}${sign}`;
    document.getElementById("went-to").textContent = shown.a ? (shown.settings.length && !shown.same ? `Begun with other settings: ${shown.settings.join("; ")}.` : "") : trainingWords(shown);
  }

  draw() {
    for (const view of this.timelines) view.draw();
    for (const chart of this.charts) chart.draw(this.zoom);
  }

  zoomed(zoom) {
    this.zoom = zoom;
    // Not at once: uPlot is still in the event that zoomed.
    requestAnimationFrame(() => this.charts.forEach((chart) => chart.draw(zoom)));
  }
}

const page = new Page();
page.show(JSON.parse(document.getElementById("picture").textContent));

addEventListener("pointerdown", (event) => {
  page.isHeld = true;
  page.pointer = event;
  if (event.pointerType === "touch") hideTip();
}, true);
for (const kind of ["pointerup", "pointercancel"]) addEventListener(kind, () => { page.isHeld = false; }, true);
addEventListener("pointermove", (event) => { page.pointer = event; }, true);
document.documentElement.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") page.pointer = null; });

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone hides its address bar
  width = innerWidth;
  requestAnimationFrame(() => page.draw());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.draw());
addEventListener("beforeprint", () => {
  document.documentElement.setAttribute("data-print", "");
  page.draw();
});
addEventListener("afterprint", () => {
  document.documentElement.removeAttribute("data-print");
  page.draw();
});

async function poll() {
  const notice = document.getElementById("notice");
  let wait_ms = POLL_MS;
  try {
    if (!document.hidden && !page.isHeld) {
      const answer = await fetch("picture.json", { cache: "no-store" });
      if (answer.status !== 200) throw new Error((await answer.text()).trim());
      page.show(await answer.json());
      notice.hidden = true;
    }
  } catch (error) {
    notice.textContent = `Not up to date: ${error.name === "TypeError" ? "elastic-train serve does not answer; start it again" : error.message}`;
    notice.hidden = false;
    wait_ms = 5 * POLL_MS;
  }
  setTimeout(poll, wait_ms);
}

if (document.documentElement.dataset.mode === "live") poll();
