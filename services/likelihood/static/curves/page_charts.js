// How one chart is drawn: curves of one or several runs, phases shaded, alarms marked.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node, number } = U;
  const HEIGHT = 190;
  const AXIS_WIDTH = 52;
  const LABEL_GAP = 5; // uPlot's between tick and label

  const LINES_LIGHT = { right: "#1f9d6b", wrong: "#d1434f", soft: "#8a93a3", a: "#2a5db0", b: "#d1832a", c: "#8e44ad", d: "#2e8b57", e: "#00838f", f: "#c2185b" };
  const LINES_DARK = { right: "#4cc38a", wrong: "#ff7b7b", soft: "#98a3b5", a: "#7fb0ff", b: "#f0a95a", c: "#c792ea", d: "#5fd39b", e: "#4dd0e1", f: "#ff7eb0" };
  // More lines than named colours lie on a scale from the first to the last.
  const SCALE_LIGHT = ["#440154", "#2c5f9e", "#14866d", "#8a7a00", "#c2571a", "#a3123f"];
  const SCALE_DARK = ["#b79cff", "#6fb4ff", "#4fd6b4", "#d9d34a", "#ffab66", "#ff7f9d"];
  const onScale = (stops, share) => {
    const at = share * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const part = (stop, k) => parseInt(stops[stop].slice(1 + 2 * k, 3 + 2 * k), 16);
    return `#${[0, 1, 2].map((k) => Math.round(part(low, k) + (at - low) * (part(low + 1, k) - part(low, k))).toString(16).padStart(2, "0")).join("")}`;
  };
  const lineColour = (line, index, count) => {
    if (!line.colour && count > 6) return onScale(U.dark() ? SCALE_DARK : SCALE_LIGHT, index / (count - 1));
    return (U.dark() ? LINES_DARK : LINES_LIGHT)[line.colour || "abcdef"[index % 6]];
  };
  const STEPS = [1, 2, 5].flatMap((n) => [...Array(10)].map((_, k) => n * 10 ** k)).sort((a, b) => a - b); // no half step on an axis
  const faint = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");

  const smoothed = (values, span) => {
    if (span < 2) return values;
    const out = new Array(values.length).fill(null);
    const held = [];
    for (let i = 0; i < values.length; i++) {
      if (values[i] === null) continue;
      held.push(values[i]);
      if (held.length > span) held.shift();
      out[i] = held.reduce((a, b) => a + b, 0) / held.length;
    }
    return out;
  };

  // A line joins all known values, over gaps too; of a single one there is nothing to join. Two are joined, and shown as such.
  const isDot = (values) => values.filter((v) => v !== null && v !== undefined).length < 3;

  class Chart {
    constructor(definition, app) {
      this.definition = definition;
      this.app = app;
      this.place = node("span", { class: "unit" }, definition.unit);
      this.legend = node("div", { class: "legend" }, (this.beyond = node("span", { class: "beyond" })));
      this.plot = node("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (e) => this.key(e) });
      this.table = node("details", { class: "values", ontoggle: () => this.fillTable() }, node("summary"), node("div"));
      this.figure = node(
        "figure",
        {},
        node("figcaption", {}, node("strong", {}, definition.title), this.place, U.chartTools(this)),
        definition.note ? node("p", { class: "note" }, definition.note) : null,
        this.legend,
        this.plot,
        this.table,
      );
      new ResizeObserver(() => this.resize()).observe(this.plot);
    }

    // All (run, line) pairs that have data, and whether there is any.
    update(runs) {
      const names = new Set(runs.flatMap((r) => Object.keys(r.series.series)));
      this.lines = this.definition.lines(names);
      this.runs = runs;
      this.curves = this.lines.flatMap((line, l) =>
        runs
          .filter((r) => r.series.series[line.key])
          .map((run) => ({ run, line, l, colour: runs.length > 1 ? run.colour : lineColour(line, l, this.lines.length) })),
      );
      for (const curve of this.curves) curve.dash = U.dashOf(curve, this.curves, runs.length);
      this.figure.hidden = !this.curves.length;
      if (this.curves.length) this.draw();
      return this.curves.length > 0;
    }

    columns() {
      const tables = [];
      const series = [{}];
      const bands = [];
      this.legendSeries = new Map();
      const quiet = this.curves.length <= 3;
      for (const run of this.runs) {
        const table = [run.series.step];
        for (const curve of this.curves.filter((c) => c.run === run)) {
          const data = run.series.series[curve.line.key];
          const show = !this.app.view.off.has(this.id(curve));
          if (quiet && data.min) {
            this.band(table, series, bands, data.max, data.min, curve.colour, show);
          } else if (quiet && this.app.smooth > 1 && !curve.line.sparse) {
            table.push(data.mean);
            series.push({ stroke: faint(curve.colour, 0.28), width: 1, spanGaps: true, points: { show: false }, show });
          }
          table.push(curve.line.sparse ? data.mean : smoothed(data.mean, this.app.smooth));
          this.legendSeries.set(this.id(curve), series.length);
          series.push({ stroke: curve.colour, width: 2, dash: curve.dash, spanGaps: true, points: { show: Boolean(curve.line.sparse) || isDot(data.mean), size: 6 }, show });
        }
        const spread = (this.definition.spread || []).map((key) => run.series.series[key]);
        if (spread.length && spread.every(Boolean)) {
          this.band(table, series, bands, spread[1].mean, spread[0].mean, this.curves.find((c) => c.run === run)?.colour || "#888888", true);
        }
        tables.push(table);
      }
      return { data: tables.length > 1 ? uPlot.join(tables) : tables[0], series, bands };
    }

    band(table, series, bands, high, low, colour, show) {
      const plain = { stroke: "#00000000", width: 0, spanGaps: true, points: { show: false }, show };
      table.push(high, low);
      series.push(plain, { ...plain });
      bands.push({ series: [series.length - 2, series.length - 1], fill: faint(colour, 0.16) });
    }

    id(curve) {
      return `${curve.run.run} ${curve.line.key}`;
    }

    draw() {
      const { data, series, bands } = this.columns();
      const shape = JSON.stringify([series.map((s) => [s.stroke, s.width, s.show, s.dash, s.points?.show]), bands.length, this.scaleKind(data), U.dark(), this.height()]);
      if (this.u && shape === this.shape) {
        this.u.setData(data, false);
        this.rescale();
      } else {
        this.shape = shape;
        this.u?.destroy();
        this.u = new uPlot(this.options(data, series, bands), data, this.plot);
        this.rescale();
      }
      this.drawLegend();
      this.describe();
      this.table.firstChild.textContent = this.app.smooth > 1 ? "Values (smoothed as drawn)" : "Values";
      if (this.table.open) this.fillTable();
    }

    rescale() {
      const [min, max] = this.app.range();
      this.u.setScale("x", { min, max });
    }

    // A logarithmic axis where it was chosen; by itself where the values of some metrics spread widely. With values of both signs it is
    // linear around 0.
    scaleKind(data) {
      if (this.app.view.log.has(this.definition.title)) return data.slice(1).every((column) => column.every((v) => v === null || v === undefined || v > 0)) ? "log" : "asinh";
      return this.logarithmic(data) ? "log" : "linear";
    }

    // Up to which size an axis with values of both signs is linear: a tenth of the usual one.
    linearUpTo(data) {
      const sizes = data.slice(1).flat().filter((v) => v).map(Math.abs).sort((a, b) => a - b);
      return sizes.length ? sizes[Math.floor(sizes.length / 2)] / 10 : 1;
    }

    logarithmic(data) {
      if (!this.definition.log || this.app.view.minus) return false;
      const values = data.slice(1).flat().filter((v) => v !== null && v !== undefined).sort((a, b) => a - b);
      return values.length > 4 && values[0] > 0 && values[values.length - 1] > 40 * values[Math.floor(values.length / 2)];
    }

    options(data, series, bands) {
      const axis = { stroke: U.colour("soft"), grid: { stroke: U.colour("grid"), width: 1 }, ticks: { stroke: U.colour("line"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
      const kind = this.scaleKind(data);
      const scales = { log: () => ({ distr: 3 }), asinh: () => ({ distr: 4, asinh: this.linearUpTo(data) }), linear: () => ({ range: (u, low, high) => this.yRange(low, high) }) };
      return {
        width: Math.max(200, this.plot.clientWidth),
        height: this.height(),
        legend: { show: false },
        padding: [8, 24, 0, 0],
        cursor: {
          drag: { x: true, y: false, setScale: false },
          sync: { key: "unspiral", setSeries: false, filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
          points: { size: 6 },
          y: false,
          bind: { dblclick: () => () => this.app.zoom(null) },
        },
        scales: {
          x: { time: false },
          y: scales[kind](),
        },
        axes: [
          { ...axis, size: 28, space: 60, incrs: STEPS },
          { ...axis, size: (u, labels) => this.labelsWidth(u, labels, axis), values: (u, marks) => this.ticks(marks) },
        ],
        series,
        bands,
        hooks: {
          ready: [(u) => u.over.addEventListener("click", () => this.click(u))],
          drawClear: [(u) => this.shade(u)],
          draw: [(u) => this.marks(u)],
          setCursor: [(u) => this.follow(u)],
          setSelect: [(u) => this.select(u)],
        },
      };
    }

    // Labels of one axis, all written in one way: as many digits as tell neighbours apart, thousands as k, and a power of ten where numbers
    // are tiny or huge. On a logarithmic axis some marks are null.
    ticks(marks) {
      const known = marks.filter((v) => v !== null);
      const largest = Math.max(...known.map(Math.abs));
      const gap = known.length > 1 ? Math.min(...known.slice(1).map((v, i) => Math.abs(v - known[i]))) : largest;
      return marks.map((v) => (v === null ? "" : this.tick(v, largest, gap)));
    }

    tick(v, largest, gap) {
      if (Math.abs(v) < gap / 1e6) return "0";
      const digits = Math.min(12, Math.max(1, Math.ceil(Math.log10(Math.abs(v) / gap)) + 2));
      const rounded = Number(v.toPrecision(digits));
      let text = String(rounded);
      if (largest < 0.001 || largest >= 1e6) text = rounded.toExponential().replace("e+", "e");
      else if (largest >= 10000) text = `${Number((rounded / 1000).toPrecision(digits))}k`;
      return text.replace(/-/g, "−");
    }

    // As wide as the longest label needs; charts with ordinary numbers stay in line with each other.
    labelsWidth(u, labels, axis) {
      if (!labels) return AXIS_WIDTH;
      u.ctx.save();
      u.ctx.font = axis.font;
      const widest = Math.max(...labels.map((text) => u.ctx.measureText(text).width));
      u.ctx.restore();
      return Math.max(AXIS_WIDTH, Math.ceil(widest) + axis.ticks.size + LABEL_GAP + 2);
    }

    yRange(low, high) {
      if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
      if (this.definition.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
      const pad = (high - low || Math.abs(high) || 1) * 0.06;
      return [low < 0 || !this.definition.zero ? low - pad : low, high > 0 || !this.definition.zero ? high + pad : high];
    }

    // Phases: the whole height for one run, a strip a run at the top for several.
    shade(u) {
      const { ctx, bbox } = u;
      const strip = 5 * devicePixelRatio;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      this.app.selected.forEach((run, i) => {
        for (const band of run.bands) {
          if (band.phase === "healthy" || band.phase === "unknown") continue;
          const from = u.valToPos(band.first - 0.5, "x", true);
          const to = u.valToPos(band.last + 0.5, "x", true);
          ctx.globalAlpha = this.app.selected.length > 1 ? 0.75 : Number(U.colour("shade"));
          ctx.fillStyle = U.colour(band.phase);
          const one = this.app.selected.length === 1;
          ctx.fillRect(from, one ? bbox.top : bbox.top + i * (strip + 1), to - from, one ? bbox.height : strip);
        }
      });
      ctx.restore();
    }

    // A threshold, and a dashed line where an alarm was raised.
    marks(u) {
      const { ctx, bbox } = u;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.lineWidth = devicePixelRatio;
      const limit = this.app.view.minus ? null : this.definition.limit;
      this.beyond.textContent = limit ? U.beyond(limit, u.scales.y) : "";
      if (limit && u.scales.y.min < limit[0] && limit[0] < u.scales.y.max) {
        const y = u.valToPos(limit[0], "y", true);
        ctx.strokeStyle = ctx.fillStyle = U.colour("acceleration");
        ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
        ctx.stroke();
        ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
        ctx.textAlign = "left";
        ctx.fillText(limit[1], bbox.left + 4 * devicePixelRatio, y - 3 * devicePixelRatio);
      }
      this.markPin(u);
      ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      const seen = new Set();
      for (const run of this.app.selected) {
        for (const alarm of run.alarms) {
          if (seen.has(`${run.run} ${alarm.step}`)) continue;
          seen.add(`${run.run} ${alarm.step}`);
          const x = u.valToPos(alarm.step, "x", true);
          ctx.globalAlpha = 0.65;
          ctx.strokeStyle = this.app.selected.length > 1 ? run.colour : U.colour("acceleration");
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
      }
      ctx.restore();
    }

    // The pinned step, through all curves.
    markPin(u) {
      const { pin } = this.app.view;
      if (pin === null || pin < u.scales.x.min || pin > u.scales.x.max) return;
      const { ctx, bbox } = u;
      const x = u.valToPos(pin, "x", true);
      ctx.save();
      ctx.setLineDash([]);
      ctx.strokeStyle = U.colour("accent");
      ctx.lineWidth = 2 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.restore();
    }

    // A click pins the step under the cursor; the end of a drag is none.
    click(u) {
      const dragged = this.dragged;
      this.dragged = false;
      const index = u.cursor.idx;
      if (!dragged && index !== null && index !== undefined) U.pin(u.data[0][index]);
    }

    select(u) {
      this.dragged = u.select.width >= 6;
      if (!this.dragged) return;
      const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
      u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      this.app.zoom(range);
    }

    // At the cursor, or at the end: the value as it was posted; beside it the one that is drawn, where it is smoothed. A value of an
    // earlier step, where this one has none, says so.
    follow(u) {
      const index = u.cursor.idx;
      const pointed = index !== null && index !== undefined;
      const at = pointed ? index : u.data[0].length - 1;
      const step = u.data[0][at];
      const text = pointed ? `step ${step}` : `${this.definition.unit}${this.app.view.minus && this.definition.unit ? ", difference" : ""}`;
      if (this.place.textContent !== text) this.place.textContent = text;
      if (step === undefined) return;
      for (const curve of this.curves) {
        const output = this.outputs?.get(this.id(curve));
        if (!output) continue;
        const found = U.valueAt(curve.run, curve.line.key, step);
        const smooth = this.app.smooth > 1 && !curve.line.sparse ? u.data[this.legendSeries.get(this.id(curve))][at] : null;
        const older = pointed && found && found.step !== step && curve.line.sparse ? ` (step ${found.step})` : "";
        output.firstChild.textContent = `${number(found?.value)}${older}`;
        output.lastChild.textContent = smooth === null || smooth === undefined ? "" : ` ~${number(smooth)}`;
      }
    }

    // One entry per line; its value for each run, in the run's colour. With one line, one entry per run.
    drawLegend() {
      const shape = this.curves.map((c) => this.id(c) + c.colour + c.dash).join() + [...this.app.view.off].join() + this.app.smooth;
      if (shape === this.legendShape) return this.follow(this.u);
      this.legendShape = shape;
      this.outputs = new Map();
      const byLine = this.runs.length > 1 && this.lines.length > 1;
      const entries = byLine ? this.lines.map((line) => this.curves.filter((c) => c.line === line)) : this.curves.map((c) => [c]);
      U.redraw(
        this.legend,
        ...entries.map((curves) => {
          const [{ line, run, dash, colour }] = curves;
          const stroke = byLine ? U.colour("soft") : colour;
          const shown = curves.some((c) => !this.app.view.off.has(this.id(c)));
          const button = node("button", { type: "button", "aria-pressed": String(shown), title: `Show or hide ${line.key}${byLine || this.runs.length === 1 ? "" : ` of ${U.titleOf(run)}`}`, "data-keep": curves.map((c) => this.id(c)).join(), onclick: () => this.toggle(curves) });
          button.innerHTML = `<svg width="20" height="8" aria-hidden="true"><line x1="0" y1="4" x2="20" y2="4" stroke="${stroke}" stroke-width="2.5" stroke-dasharray="${dash.join(" ")}"/></svg>`;
          button.append(byLine || this.runs.length === 1 ? line.label : U.apart(run, this.runs));
          for (const curve of curves) {
            const output = node("output", { style: byLine ? `color:color-mix(in srgb, ${curve.colour} 75%, var(--ink))` : null, title: `${U.titleOf(curve.run)}: last value${this.app.smooth > 1 && !line.sparse ? `, and ~ smoothed over ${this.app.smooth} points` : ""}` }, node("b"), node("small"));
            this.outputs.set(this.id(curve), output);
            button.append(output);
          }
          return button;
        }),
        this.beyond,
      );
      this.follow(this.u);
    }

    toggle(curves) {
      const show = curves.every((c) => this.app.view.off.has(this.id(c)));
      for (const curve of curves) {
        if (show) this.app.view.off.delete(this.id(curve));
        else this.app.view.off.add(this.id(curve));
      }
      this.app.remember();
      this.draw();
    }

    describe() {
      const parts = this.curves.slice(0, 8).map((curve) => {
        const values = curve.run.series.series[curve.line.key].mean;
        const known = values.filter((v) => v !== null);
        if (!known.length) return "";
        const low = Math.min(...known);
        const at = curve.run.series.step[values.indexOf(low)];
        return `${U.titleOf(curve.run)}, ${curve.line.label}: first ${number(known[0])}, last ${number(known[known.length - 1])}, lowest ${number(low)} at step ${at}`;
      });
      this.plot.setAttribute("aria-label", `${this.definition.title}, ${this.definition.unit}. ${parts.join(". ")}`);
    }

    fillTable() {
      if (!this.table.open) return;
      const { data } = this.u;
      const stepSize = Math.max(1, Math.ceil(data[0].length / 40));
      const columns = this.curves.map((c) => this.legendSeries.get(this.id(c)));
      const head = node("tr", {}, node("th", { scope: "col" }, "step"), ...this.curves.map((c) => node("th", { scope: "col", class: "n" }, this.runs.length > 1 ? `${U.titleOf(c.run)} ${c.line.label}` : c.line.label)));
      const rows = [];
      for (let i = 0; i < data[0].length; i += stepSize) {
        rows.push(node("tr", {}, node("th", { scope: "row" }, String(data[0][i])), ...columns.map((at) => node("td", { class: "n" }, number(data[at][i])))));
      }
      U.redraw(this.table.lastElementChild, U.wide(`Values of ${this.definition.title}`, node("table", {}, node("thead", {}, head), node("tbody", {}, ...rows))));
    }

    key(event) {
      const { u } = this;
      const index = u.cursor.idx ?? u.data[0].length - 1;
      const [min, max] = this.app.range();
      const centre = u.data[0][index];
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
      if (event.key in moves) {
        const next = Math.min(u.data[0].length - 1, Math.max(0, index + moves[event.key]));
        u.setCursor({ left: u.valToPos(u.data[0][next], "x"), top: 10 });
      } else if (event.key === "+" || event.key === "=") {
        this.app.zoom([centre - (max - min) / 4, centre + (max - min) / 4]);
      } else if (event.key === "-") {
        this.app.zoom([centre - (max - min), centre + (max - min)]);
      } else if (event.key === "Enter" || event.key === "p") {
        U.pin(centre);
      } else if (event.key === "0" || (event.key === "Escape" && !this.app.view.full)) {
        this.app.zoom(null);
      } else {
        return;
      }
      event.preventDefault();
    }

    height() {
      return this.figure.classList.contains("full") ? Math.max(HEIGHT, this.plot.clientHeight) : HEIGHT; // what title and legend leave
    }

    resize() {
      const [width, height] = [this.plot.clientWidth, this.height()];
      if (this.u && width && (width !== this.u.width || height !== this.u.height)) this.u.setSize({ width, height });
    }
  }

  U.Chart = Chart;
})();
