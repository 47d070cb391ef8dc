"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  root.classList.add("scripted");

  // ---- colors: of the system, or as chosen
  const themes = all("[data-theme]");
  const paint = (name) => {
    root.style.colorScheme = name === "auto" ? "light dark" : name;
    themes.forEach((button) => button.setAttribute("aria-pressed", button.dataset.theme === name));
  };
  themes.forEach((button) => button.addEventListener("click", () => paint(button.dataset.theme)));

  // ---- the graph: drag or arrow keys pan; Ctrl and wheel, buttons and + - 0 zoom
  const view = document.getElementById("view");
  const graph = document.getElementById("graph");
  const home = graph.viewBox.baseVal;
  const whole = { x: home.x, y: home.y, width: home.width, height: home.height };
  let box = { ...whole };
  view.classList.add("ready");
  const grown = 1.35; // the largest magnification of a small graph
  const scaled = Math.min(grown, view.clientWidth / (whole.width * 1.05));
  const tall = whole.height * 1.06 * (scaled < 0.45 ? 0.67 : scaled);
  view.parentElement.parentElement.style.setProperty("--tall", `${Math.min(Math.max(tall, 320), 960)}px`);

  const show = () => graph.setAttribute("viewBox", `${box.x} ${box.y} ${box.width} ${box.height}`);
  const scale = () => Math.max(box.width / graph.clientWidth, box.height / graph.clientHeight) || 1;
  const fit = () => {
    const width = Math.max(whole.width, graph.clientWidth / grown);
    const height = Math.max(whole.height, graph.clientHeight / grown);
    box = { x: whole.x - (width - whole.width) / 2, y: whole.y - (height - whole.height) / 2, width, height };
    show();
  };
  const zoom = (factor, at) => {
    const limit = Math.min(Math.max(scale() * factor, 0.2), (4 * Math.max(whole.width, 600)) / graph.clientWidth) / scale();
    const x = at ? at.x : box.x + box.width / 2;
    const y = at ? at.y : box.y + box.height / 2;
    box = { x: x - (x - box.x) * limit, y: y - (y - box.y) * limit, width: box.width * limit, height: box.height * limit };
    show();
  };
  // a graph that is too wide starts at its left end
  const begin = () => {
    fit();
    if (scale() < 2.2) return;
    zoom(1.5 / scale(), { x: whole.x, y: whole.y + whole.height / 2 });
  };
  const reach = (each) => {
    const place = each.getBBox();
    const inside = place.x > box.x && place.x + place.width < box.x + box.width;
    if (inside && place.y > box.y && place.y + place.height < box.y + box.height) return;
    box.x = place.x + place.width / 2 - box.width / 2;
    box.y = place.y + place.height / 2 - box.height / 2;
    show();
  };
  const move = (x, y) => { box.x += x * scale(); box.y += y * scale(); show(); };
  const point = (event) => {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(graph.getScreenCTM().inverse());
    return { x: place.x, y: place.y };
  };

  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.0022)), point(event));
  }, { passive: false });

  const fingers = new Map();
  let dragged = 0;
  const spread = () => { const [a, b] = [...fingers.values()]; return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY); };
  view.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    fingers.set(event.pointerId, event);
    dragged = 0;
  });
  window.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) return;
    const apart = fingers.size > 1 ? spread() : 0;
    fingers.set(event.pointerId, event);
    dragged += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
    if (dragged < 4) return;
    view.classList.add("held");
    move((before.clientX - event.clientX) / fingers.size, (before.clientY - event.clientY) / fingers.size);
    if (apart) zoom(apart / spread());
  });
  const release = (event) => { fingers.delete(event.pointerId); if (!fingers.size) view.classList.remove("held"); };
  window.addEventListener("pointerup", release);
  window.addEventListener("pointercancel", release);

  const steps = { ArrowLeft: [-60, 0], ArrowRight: [60, 0], ArrowUp: [0, -60], ArrowDown: [0, 60] };
  view.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (steps[event.key]) move(...steps[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(0.8);
    else if (event.key === "-") zoom(1.25);
    else if (event.key === "0") fit();
    else return;
    event.preventDefault();
  });
  const zooms = { in: () => zoom(0.8), out: () => zoom(1.25), fit };
  all("[data-zoom]").forEach((button) => button.addEventListener("click", zooms[button.dataset.zoom]));
  begin();
  new ResizeObserver(begin).observe(view);

  // ---- pointing at a stage highlights its boundaries, pointing at an arrow its two stages
  const stages = all(".stage", graph);
  const arrows = all(".arrow", graph);
  const ties = all(".tie", graph);
  const light = (found) => {
    graph.classList.toggle("pointed", found.length > 0);
    [...stages, ...arrows, ...ties].forEach((each) => each.classList.toggle("lit", found.includes(each)));
  };
  const around = (each) => {
    if (each.dataset.arrow) return [each, stages[each.dataset.from], stages[each.dataset.to]];
    const joined = arrows.filter((arrow) => [arrow.dataset.from, arrow.dataset.to].includes(each.dataset.stage));
    const held = ties.filter((tie) => tie.dataset.stages.split(" ").includes(each.dataset.stage));
    const far = [
      ...joined.flatMap((arrow) => [stages[arrow.dataset.from], stages[arrow.dataset.to]]),
      ...held.flatMap((tie) => tie.dataset.stages.split(" ").map((number) => stages[number])),
    ];
    return [each, ...joined, ...held, ...far];
  };

  // ---- opening a stage or an arrow shows its panel
  const panels = document.getElementById("panels");
  const drawing = panels.parentElement;
  let chosen = null;
  const open = (each) => {
    chosen = each === chosen ? null : each;
    const name = chosen && (chosen.dataset.stage ? `panel-stage-${chosen.dataset.stage}` : `panel-arrow-${chosen.dataset.arrow}`);
    all(".panel", panels).forEach((panel) => panel.classList.toggle("open", panel.id === name));
    [...stages, ...arrows].forEach((other) => {
      other.classList.toggle("chosen", other === chosen);
      other.setAttribute("aria-expanded", other === chosen);
    });
    panels.classList.toggle("open", Boolean(chosen));
    drawing.classList.toggle("open", Boolean(chosen));
    panels.scrollTop = 0;
  };
  [...stages, ...arrows].forEach((each) => {
    each.addEventListener("pointerenter", () => { if (!fingers.size) light(around(each)); });
    each.addEventListener("pointerleave", () => light([]));
    each.addEventListener("focus", () => {
      if (!each.matches(":focus-visible")) return;
      reach(each);
      light(around(each));
    });
    each.addEventListener("blur", () => light([]));
    each.addEventListener("click", () => { if (dragged < 4) open(each); });
    each.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); open(each); }
    });
  });
  const close = () => { const last = chosen; if (last) { open(last); last.focus({ preventScroll: true }); } };
  document.getElementById("close").addEventListener("click", close);
  drawing.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });

  // ---- the schedule: a micro-batch is highlighted in all rows
  const tip = document.getElementById("hover");
  all(".clocks").forEach((clocks) => {
    const follow = (number) => {
      clocks.classList.toggle("tracing", number !== null);
      all("[data-m]", clocks).forEach((block) => block.classList.toggle("same", block.dataset.m === number));
    };
    clocks.addEventListener("pointermove", (event) => {
      const block = event.target.closest("[data-t]");
      tip.hidden = !block;
      if (!block) return;
      tip.textContent = block.dataset.t;
      const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
      tip.style.left = `${left}px`;
      tip.style.top = `${event.clientY + 18}px`;
    });
    clocks.addEventListener("pointerover", (event) => {
      const block = event.target.closest("[data-m]");
      follow(block ? block.dataset.m : null);
    });
    clocks.addEventListener("pointerleave", () => { tip.hidden = true; follow(null); });
  });
})();
