"use strict";
// Lines over steps, drawn by uPlot. The charts of a page share one cursor and one zoom.

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A chart over steps. lines: [{series, color, dash?, label?}, ...], one or two, of observe/series.py.
class StepChart {
  constructor(charts, title, lines, options = {}) {
    this.charts = charts;
    this.lines = lines;
    this.options = options;
    this.value = element("span", { class: "value" });
    this.host = element("div");
    this.figure = element("figure", { class: options.wide ? "chart wide" : "chart", "data-name": title },
      element("figcaption", {}, element("b", {}, title), options.aside ? element("span", {}, options.aside) : null, this.value), this.host);
    const notes = lines.flatMap((line) => this.notes(line));
    if (notes.length) this.figure.append(element("p", { class: "note" }, `${notes.join("; ").replace(/^n/, "N")}.`));
    charts.push(this);
  }

  notes({ series, label }) {
    const of = label ? `${label}: ` : "";
    const found = [];
    if (series.gaps) found.push(`${of}not finite at ${grouped(series.gaps)} ${series.gaps === 1 ? "step" : "steps"}, first at step ${grouped(series.first_gap)}`);
    return found;
  }

  data() {
    const tables = this.lines.map(({ series }) => [series.at, this.isLog() ? series.values.map((value) => (value > 0 ? value : null)) : series.values]);
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  // Times that differ by orders of magnitude would be one line along the bottom.
  isLog() {
    if (!this.options.isTime) return false;
    const values = this.lines.flatMap(({ series }) => series.values).filter((value) => value > 0).sort((a, b) => a - b);
    return values.length > 2 && values[values.length - 1] > 30 * values[values.length >> 1];
  }

  // Of all steps, also where the first and the last ones have no value here.
  range(low, high) {
    const { over } = this.options;
    const [from, to] = over && over.length ? [Math.min(low, over[0]), Math.max(high, over[over.length - 1])] : [low, high];
    return from === to ? [from - 1, to + 1] : [from, to];
  }

  // Whether two runs have the same values, as far as both are drawn.
  isSame() {
    if (this.lines.length < 2) return false;
    const [a, b] = this.lines.map(({ series }) => series);
    const end = Math.min(a.at[a.at.length - 1], b.at[b.at.length - 1]);
    const drawn = ({ at, values }) => JSON.stringify(at.flatMap((place, index) => (place <= end ? [[place, values[index]]] : [])));
    return drawn(a) === drawn(b);
  }

  format(value) {
    return this.options.isTime ? stepSeconds(value) : significant(value);
  }

  draw(zoom) {
    const width = this.host.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.destroy();
    const axis = { stroke: color("soft"), font: `12px ${getComputedStyle(document.body).fontFamily}`, grid: { stroke: color("line"), width: 1 }, ticks: { show: false } };
    const isLog = this.isLog();
    this.plot = new uPlot({
      width, height: this.options.wide ? 230 : 168,
      padding: [8, 26, 0, 0],
      legend: { show: false },
      cursor: { y: false, sync: { key: "steps", setSeries: false }, drag: { x: true, y: false, setScale: true }, points: { size: 7 } },
      scales: { x: { time: false, ...(zoom ? { range: () => [zoom.from, zoom.to] } : { range: (_, low, high) => this.range(low, high) }) }, y: isLog ? { distr: 3 } : {} },
      axes: [
        { ...axis, grid: { show: false }, gap: 6, size: 30, space: 70, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? grouped(tick) : "")) },
        { ...axis, size: 66, gap: 8, space: 34, values: (_, ticks) => ticks.map((tick) => (tick === null || (isLog && !/^1(e|0*$)/.test(String(tick < 1 ? 1 / tick : tick).replace(/\.0+$/, "")))) ? "" : this.format(tick)) },
      ],
      series: [{}, ...this.lines.map((line) => ({ stroke: color(line.color), width: 1.5, dash: line.dash, points: { show: line.series.at.length < 60, size: 5, fill: color(line.color) } }))],
      hooks: {
        setCursor: [(plot) => this.told(plot)],
        setSelect: [(plot) => this.selected(plot)],
        draw: [(plot) => this.ticks(plot)],
      },
    }, this.data(), this.host);
    this.plot.over.addEventListener("dblclick", () => this.charts.onZoom(null));
    this.told(this.plot);
  }

  // The values under the cursor; without one, the newest.
  told(plot) {
    const parts = [];
    const index = plot.cursor.idx;
    this.lines.forEach((line, at) => {
      const own = line.series;
      const shown = index === null || index === undefined ? own.values[own.values.length - 1] : plot.data[at + 1][index];
      const words = shown === undefined ? "" : this.format(shown);
      if (this.lines.length === 1) parts.push(element("span", {}, words));
      else if (words) parts.push(element("span", { class: line.color }, `${line.label} ${words}`));
    });
    if (index !== null && index !== undefined) parts.push(` at step ${grouped(plot.data[0][index])}`);
    this.value.replaceChildren(...parts);
  }

  selected(plot) {
    if (plot.select.width < 4) return;
    const from = plot.posToVal(plot.select.left, "x"), to = plot.posToVal(plot.select.left + plot.select.width, "x");
    this.charts.onZoom(to - from < 1 ? null : { from, to });
  }

  // A tick at the bottom for each value that is not finite, and a line where two runs part.
  ticks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height + 6);
    ctx.clip();
    ctx.fillStyle = color("fault");
    for (const { series } of this.lines) {
      if (!series.gaps) continue;
      series.at.forEach((at, index) => {
        if (series.values[index] === null) ctx.fillRect(plot.valToPos(at, "x", true) - 1, bbox.top + bbox.height - 8 * devicePixelRatio, 2 * devicePixelRatio, 8 * devicePixelRatio);
      });
    }
    if (this.options.parts && !this.isSame()) {
      ctx.strokeStyle = color("fault");
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.setLineDash([]);
      ctx.beginPath();
      const x = plot.valToPos(this.options.parts, "x", true);
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const isRight = x > bbox.left + bbox.width * 0.7;
      ctx.font = `${12 * devicePixelRatio}px ${getComputedStyle(document.body).fontFamily}`;
      ctx.textAlign = isRight ? "right" : "left";
      ctx.textBaseline = "top";
      ctx.fillText("the runs differ from here on", Math.max(x, bbox.left) + (isRight ? -7 : 7) * devicePixelRatio, bbox.top + 2);
    }
    ctx.restore();
  }
}

