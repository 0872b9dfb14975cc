'use strict';
(() => {
  const CHARTS = [
    {id: 'loss', title: 'Loss', column: 'loss', outliers: 'loss_outliers', logarithmic: true, smooth: true},
    {id: 'validation', title: 'Validation loss', source: 'validation', column: 'validation_loss', logarithmic: true, points: true},
    {id: 'grad_norm', title: 'Gradient norm, before clipping', column: 'grad_norm', outliers: 'grad_norm_outliers', logarithmic: true, smooth: true},
    {id: 'lr', title: 'Learning rate', column: 'lr'},
    {id: 'tokens_per_second', title: 'Tokens per second', column: 'tokens_per_second', smooth: true, zero: true},
    {id: 'seconds', title: 'Seconds per step', column: 'seconds', smooth: true, zero: true},
    {id: 'parts', title: 'Seconds per step by part', prefix: 'parts.', smooth: true, zero: true},
    {id: 'ranks', title: 'Seconds in collectives by rank; the others wait for the lowest', prefix: 'communication_by_rank.', label: 'rank ', smooth: true, zero: true},
    {id: 'memory', title: 'Memory of the largest rank, GB', column: 'memory_bytes', scale: 1e-9, zero: true},
    {id: 'peak_share', title: 'Share of the measured peak of matrix products, %', column: 'peak_share', scale: 100, smooth: true, zero: true},
    {id: 'balance_loss', title: 'Load-balance loss of routers', column: 'balance_loss', smooth: true},
  ];
  const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3], [1, 5], [12, 6]];
  const byId = (id) => document.getElementById(id);
  const hidden = new Set();  // names of the runs that are not drawn
  const drawn = new Map();   // chart id -> {figure, place, plot, zoomed}
  let data = JSON.parse(byId('data').textContent);

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runColour = (index) => colour(`--run${index % 8}`);

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  function shown(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return 'none';
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, 'e');
    return value.toLocaleString('en', {maximumSignificantDigits: size >= 1000 ? 7 : 5});
  }

  // Exponential moving average with bias correction: divided by the sum of the weights, so that the first values are not
  // pulled to zero.
  function smoothed(values, weight) {
    if (weight === 0) return values;
    let sum = 0, total = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  // The curves of a chart: one entry per run and column, with the values (`values`) and the drawn, smoothed ones
  // (`curve`).
  function columnsOf(chart) {
    const weight = chart.smooth ? Number(byId('smoothing').value) : 0;
    const logarithmic = chart.logarithmic && byId('logarithmic').checked;
    const columns = [];
    data.runs.forEach((run, index) => {
      if (hidden.has(run.name)) return;
      const source = run[chart.source || 'steps'];
      const names = chart.prefix ? Object.keys(source).filter((name) => name.startsWith(chart.prefix)) : [chart.column];
      names.forEach((name, place) => {
        if (!source[name] || !source[name].some((value) => value !== null)) return;
        const values = source[name].map((value) => (value === null ? null : value * (chart.scale || 1)));
        const curve = smoothed(values, weight).map((value) => (logarithmic && value <= 0 ? null : value));
        const part = chart.prefix ? (chart.label || '') + name.slice(chart.prefix.length).replaceAll('_', ' ') : '';
        const label = [data.runs.length > 1 || !part ? run.name : '', part].filter(Boolean).join(', ');
        const shade = chart.prefix && data.runs.length === 1 ? place : index;
        columns.push({run, label, shade, dash: chart.prefix && data.runs.length > 1 ? place : 0, steps: source.step, values, curve});
      });
    });
    return columns;
  }

  function summary(chart, columns) {
    if (columns.length === 0) return `${chart.title}: no values`;
    const lines = columns.map(({label, steps, values}) => {
      const known = values.filter((value) => value !== null);
      const least = known.reduce((a, b) => Math.min(a, b));
      return `${label}: ${known.length} values from step ${steps[0]} to ${steps[steps.length - 1]}, ` +
             `first ${shown(known[0])}, last ${shown(known[known.length - 1])}, least ${shown(least)}`;
    });
    return `${chart.title}. ${lines.join('. ')}.`;
  }

  // A legend mark: a piece of the line in its colour and dash pattern.
  function piece(shade, dash) {
    const ink = runColour(shade), stops = [];
    let end = 0;
    DASHES[dash % DASHES.length].forEach((length, place) => {
      stops.push(`${place % 2 ? 'transparent' : ink} ${end}px ${end + length}px`);
      end += length;
    });
    const background = stops.length ? `repeating-linear-gradient(to right, ${stops.join(', ')})` : ink;
    return element('span', {class: 'swatch piece', style: `background: ${background}`});
  }

  function readout(columns, step) {
    const parts = [element('b', {}, `step ${step}`)];
    for (const {run, label, shade, dash, steps, values} of columns) {
      let row = steps.length - 1;
      while (row >= 0 && steps[row] > step) --row;
      if (row < 0) continue;
      const here = steps[row] === step ? '' : ` (step ${steps[row]})`;
      parts.push(' · ', piece(shade, dash), ` ${label} `, element('b', {}, shown(values[row])), here);
      for (const [kind, what] of [['loss_outliers', 'loss'], ['grad_norm_outliers', 'gradient norm']]) {
        const found = run[kind].find((entry) => entry.step === step);
        if (found && steps[row] === step) parts.push(element('span', {class: 'alarm'}, ` ${what} stands out${found.z === null ? '' : `, z ${shown(found.z)}`}`));
      }
    }
    return parts;
  }

  function table(columns) {
    const rows = [];
    const steps = [...new Set(columns.flatMap((column) => column.steps))].sort((a, b) => a - b);
    const every = Math.max(1, Math.ceil(steps.length / 50));
    steps.forEach((step, place) => {
      if (place % every !== 0 && place !== steps.length - 1) return;
      rows.push(element('tr', {}, element('th', {scope: 'row'}, String(step)), ...columns.map(({steps: own, values}) => {
        const row = own.indexOf(step);
        return element('td', {}, row < 0 ? '' : shown(values[row]));
      })));
    });
    const head = element('tr', {}, element('th', {scope: 'col'}, 'step'), ...columns.map(({label}) => element('th', {scope: 'col'}, label)));
    return element('table', {}, element('thead', {}, head), element('tbody', {}, ...rows));
  }

  function options(chart, columns, width) {
    const logarithmic = chart.logarithmic && byId('logarithmic').checked;
    const axis = {stroke: colour('--faint'), grid: {stroke: colour('--line'), width: 1}, ticks: {stroke: colour('--line'), width: 1}};
    const series = [{label: 'step'}];
    for (const {label, shade, dash} of columns) {
      const stroke = runColour(shade);
      series.push({label, stroke, width: 1.5, dash: DASHES[dash % DASHES.length], points: {show: chart.points || undefined, size: 6, fill: stroke}});
    }
    if (chart.outliers) {
      for (const {label} of columns) {
        series.push({label: `${label}, stands out`, stroke: colour('--alarm'), paths: () => null, points: {show: true, size: 10, width: 2, fill: 'transparent'}});
      }
    }
    return {
      width, height: 240, series, legend: {show: false},
      scales: {x: {time: false}, y: {distr: logarithmic ? 3 : 1, range: chart.zero && !logarithmic ? (u, low, high) => [0, high > 0 ? high * 1.05 : 1] : undefined}},
      axes: [{...axis}, {...axis, size: 64, values: (u, marks) => marks.map((mark) => (mark === null ? '' : shown(mark)))}],
      cursor: {sync: {key: 'step'}, y: false},
      hooks: {setScale: [(u, key) => {
        const entry = drawn.get(chart.id), steps = u.data[0];
        if (key === 'x' && entry) entry.zoomed = u.scales.x.min > steps[0] || u.scales.x.max < steps[steps.length - 1];
      }], setCursor: [(u) => {
        if (u.cursor.idx === null || u.cursor.idx === undefined) return;
        const entry = drawn.get(chart.id);
        if (entry) entry.figure.querySelector('.readout').replaceChildren(...readout(columns, u.data[0][u.cursor.idx]));
      }]},
    };
  }

  function tables(chart, columns) {
    const all = columns.map(({steps, curve}) => [steps, curve]);
    if (chart.outliers) {
      for (const {run, steps, curve} of columns) {
        const outlying = new Set(run[chart.outliers].map((entry) => entry.step));
        all.push([steps, curve.map((value, row) => (outlying.has(steps[row]) ? value : null))]);
      }
    }
    return uPlot.join(all);
  }

  function onKey(event, id) {
    const {plot, figure} = drawn.get(id);
    const [first, last] = plot.series[0].idxs;  // the rows in the visible range
    const at = plot.cursor.idx ?? first - 1, page = Math.max(Math.ceil((last - first) / 10), 1);
    const wanted = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: first, End: last, PageUp: at - page, PageDown: at + page}[event.key];
    if (wanted === undefined) return;
    const to = Math.min(Math.max(wanted, first), last);
    event.preventDefault();
    figure.querySelector('.readout').setAttribute('aria-live', 'polite');
    plot.setCursor({left: plot.valToPos(plot.data[0][to], 'x'), top: 0});
  }

  function draw(chart) {
    const columns = columnsOf(chart);
    let entry = drawn.get(chart.id);
    if (columns.length === 0) {
      if (entry) { entry.plot.destroy(); entry.figure.remove(); drawn.delete(chart.id); }
      return;
    }
    if (!entry) {
      const title = element('h3', {id: `chart-${chart.id}`}, chart.title);
      const place = element('div', {class: 'plot', tabindex: '0', role: 'group', 'aria-roledescription': 'chart'});
      const values = element('details', {}, element('summary', {}, 'Values'), element('div', {class: 'scroll'}));
      const figure = element('article', {class: 'chart', 'data-chart': chart.id}, title, place, element('p', {class: 'readout'}), values);
      entry = {figure, place};
      place.addEventListener('keydown', (event) => onKey(event, chart.id));
      place.addEventListener('pointermove', () => figure.querySelector('.readout').removeAttribute('aria-live'));
      const after = CHARTS.slice(CHARTS.indexOf(chart) + 1).map(({id}) => drawn.get(id)).find(Boolean);
      byId('charts').insertBefore(figure, after ? after.figure : null);
      drawn.set(chart.id, entry);
      new ResizeObserver(() => entry.plot && entry.plot.setSize({width: place.clientWidth, height: 240})).observe(place);
    }
    const joined = tables(chart, columns);
    const zoom = entry.plot && entry.zoomed ? {min: entry.plot.scales.x.min, max: entry.plot.scales.x.max} : null;
    if (entry.plot) entry.plot.destroy();
    entry.plot = new uPlot(options(chart, columns, Math.max(entry.place.clientWidth, 160)), joined, entry.place);
    if (zoom) entry.plot.setScale('x', zoom);
    entry.zoomed = zoom !== null;
    entry.place.setAttribute('aria-label', summary(chart, columns));
    entry.figure.dataset.points = columns.reduce((sum, {curve}) => sum + curve.filter((value) => value !== null).length, 0);
    entry.figure.querySelector('.readout').replaceChildren(...readout(columns, joined[0][joined[0].length - 1]));
    entry.figure.querySelector('details .scroll').replaceChildren(table(columns));
  }

  function drawHeader() {
    const names = data.runs.map(({name}) => name).join(', ');
    document.title = `${names} · Tessera`;
    byId('title').textContent = names;
    byId('state').textContent = data.runs.map(({name, state, rows, notes}) =>
      [`${data.runs.length > 1 ? `${name}: ` : ''}${rows} steps, ${state}`, ...notes].join('; ')).join(' · ');
    byId('runs').replaceChildren(...(data.runs.length < 2 ? [] : data.runs.map(({name}, index) => {
      const swatch = element('span', {class: 'swatch', style: `background: var(--run${index % 8})`});
      const button = element('button', {type: 'button', 'aria-pressed': String(!hidden.has(name))}, swatch, name);
      button.addEventListener('click', () => {
        if (!hidden.delete(name)) hidden.add(name);
        button.setAttribute('aria-pressed', String(!hidden.has(name)));
        CHARTS.forEach(draw);
      });
      return button;
    })));
  }

  function keyed(headings, rows) {
    const head = element('thead', {}, element('tr', {}, ...headings.map((text) => element('th', {scope: 'col'}, text))));
    const body = element('tbody', {}, ...rows.map(([first, ...rest]) =>
      element('tr', {}, element('th', {scope: 'row'}, first), ...rest.map((text) => element('td', {}, text)))));
    return [head, body];
  }

  const PARTS = ['compute', 'communication', 'wait', 'data', 'checkpoint'];

  function drawProfile({name, profile}) {
    const steps = Math.max(profile.last_step - profile.first_step + 1, 1);
    const percent = (value, total) => `${(total > 0 ? 100 * value / total : 0).toFixed(1)} %`;
    const each = (value, scale = 1) => shown(Number((scale * value / steps).toPrecision(4)));
    const totals = profile.ranks.map((rank) => PARTS.reduce((sum, part) => sum + rank[part], 0));
    const most = Math.max(...totals, 1e-9);
    const bars = profile.ranks.map((rank, index) => element('div', {class: 'bar', 'aria-hidden': 'true'},
      element('span', {class: 'bar-name'}, `rank ${rank.rank}`),
      element('span', {class: 'bar-track'}, ...PARTS.map((part, place) => element('span', {
        class: 'bar-part', title: `${part} ${percent(rank[part], totals[index])}`,
        style: `width: ${100 * rank[part] / most}%; background: var(--run${place})`})))));
    const legend = element('p', {class: 'legend', 'aria-hidden': 'true'}, ...PARTS.flatMap((part, place) =>
      [element('span', {class: 'swatch small', style: `background: var(--run${place})`}), ` ${part} `]));
    const parts = keyed(['rank', ...PARTS.map((part) => `${part}, ms`), 'collectives behind compute'], profile.ranks.map((rank, index) =>
      [String(rank.rank), ...PARTS.map((part) => `${each(rank[part], 1e3)} (${percent(rank[part], totals[index])})`), percent(rank.hidden, 1)]));
    const longest = (title, headings, rows) => element('details', {}, element('summary', {}, title),
      element('div', {class: 'scroll'}, element('table', {}, ...keyed(headings, rows))));
    const timed = (row) => [row.name, each(row.calls), each(row.seconds, 1e3)];
    return element('article', {class: 'profile', 'data-profile': name},
      element('h3', {}, `${data.runs.length > 1 ? `${name}, ` : ''}steps ${profile.first_step} to ${profile.last_step}`),
      ...bars, legend, element('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Time by rank and part'}, element('table', {}, ...parts)),
      longest('Operations of rank 0, longest first', ['name', 'calls per step', 'self ms per step'], profile.operations.map(timed)),
      longest('Modules of rank 0, forward and backward', ['name', 'calls per step', 'self ms per step'], profile.modules.map(timed)),
      longest('Collectives of rank 0', ['name', 'group', 'calls per step', 'MB per step', 'ms waited per step'], profile.collectives.map((row) =>
        [row.name, row.group, each(row.calls), each(row.bytes, 1e-6), each(row.seconds, 1e3)])));
  }

  function drawTexts() {
    const profiled = data.runs.filter(({profile}) => profile);
    byId('profile').hidden = profiled.length === 0;
    byId('profile-list').replaceChildren(...profiled.map(drawProfile));
    const settings = data.runs.map(({recipe}) => new Map(recipe));
    byId('differences').hidden = data.runs.length < 2;
    byId('differences-table').replaceChildren(...keyed(['setting', ...data.runs.map(({name}) => name)],
      data.differing.length === 0 ? [['none', ...data.runs.map(() => '')]]
        : data.differing.map((key) => [key, ...settings.map((recipe) => recipe.get(key) ?? 'null')])));
    const samples = data.runs.flatMap((run) => run.samples.map((sample) => ({...sample, run: run.name})));
    samples.sort((a, b) => a.step - b.step);
    byId('samples').hidden = samples.length === 0;
    byId('samples-list').replaceChildren(...samples.map(({step, prompt, text, run}) => element('article', {class: 'sample'},
      element('h3', {}, `step ${step}${data.runs.length > 1 ? `, ${run}` : ''}`), element('p', {class: 'prompt'}, prompt), element('p', {}, text))));
    const warnings = data.runs.flatMap((run) => run.warnings.map((warning) => ({...warning, run: run.name})));
    byId('warnings').hidden = warnings.length === 0;
    byId('warnings-list').replaceChildren(...warnings.map(({step, text, run}) =>
      element('li', {}, `${data.runs.length > 1 ? `${run}, ` : ''}step ${step}: ${text}`)));
    byId('sessions').replaceChildren(...data.runs.flatMap(({name, folder, sessions}) => sessions.map(({first_step: first, facts}) =>
      element('details', {}, element('summary', {}, `${name}, ${first === 0 ? 'from the beginning' : `resumed after step ${first}`}`),
        element('table', {}, ...keyed(['', ''], [['folder', folder], ...facts]))))));
    byId('recipes').replaceChildren(...data.runs.map(({name, recipe}) => element('details', {}, element('summary', {}, name),
      element('div', {class: 'scroll'}, element('table', {}, ...keyed(['setting', 'value'], recipe))))));
  }

  function drawAll() {
    drawHeader();
    CHARTS.forEach(draw);
    // The texts are drawn again only if they changed, so that opened details stay open.
    const texts = JSON.stringify(data.runs.map(({recipe, samples, warnings, sessions, profile}) => [recipe, samples, warnings, sessions, profile]));
    if (texts !== drawAll.texts) { drawAll.texts = texts; drawTexts(); }
  }

  // A page that is served together with data.json updates itself. If the first fetch fails there is no such server, and
  // the page does not try again.
  async function follow() {
    let text = null;
    try {
      const answer = await fetch('data.json', {cache: 'no-store'});
      if (answer.ok) text = await answer.text();
    } catch (error) { /* handled below */ }
    if (text === null) {
      if (follow.last === undefined) return;
      byId('state').textContent = 'the run no longer answers; this page shows its last data';
    } else if (text !== follow.last) {
      data = JSON.parse(text);
      drawAll();
    } else {
      drawHeader();
    }
    follow.last = text ?? follow.last;
    setTimeout(follow, 2000);
  }

  byId('smoothing').addEventListener('input', () => {
    byId('smoothing-value').textContent = byId('smoothing').value;
    CHARTS.forEach(draw);
  });
  byId('logarithmic').addEventListener('change', () => CHARTS.forEach(draw));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => CHARTS.forEach(draw));
  document.body.classList.toggle('picture', location.hash === '#picture');
  drawAll();
  if (location.protocol.startsWith('http')) setTimeout(follow, 2000);
})();
