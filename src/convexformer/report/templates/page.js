"use strict";
// Draws the charts and moves the slider. Colours are CSS variables, so themes and print need nothing from here.
(async function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const options = {
    config: data.config,
    renderer: "svg",
    actions: false,
    ast: true, // expressions are interpreted: the page's policy forbids eval
    defaultStyle: false,
    tooltip: { theme: "page", disableDefaultStyle: true },
  };
  const views = {};
  for (const [name, spec] of Object.entries(data.charts)) {
    const found = await vegaEmbed(document.getElementById(name), spec, options);
    views[name] = found.view;
    const drawn = document.querySelector(`#${CSS.escape(name)} svg`);
    drawn.setAttribute("aria-hidden", "true"); // the element around it has the description
  }

  const slider = document.getElementById("at");
  if (slider) {
    const facts = document.querySelectorAll("[data-fact]");
    const move = () => {
      const at = Number(slider.value);
      const step = data.steps[at];
      facts.forEach((fact) => (fact.textContent = step[Number(fact.dataset.fact)]));
      slider.setAttribute("aria-valuetext", `${slider.dataset.name} ${step[0]}`);
      return Promise.all(data.follows.map((name) => views[name].signal("at", at).runAsync()));
    };
    slider.addEventListener("input", move);
    if (Number(slider.value) !== Number(slider.defaultValue)) await move(); // a reload may keep the old position
  }

  const overlay = document.getElementById("overlay");
  if (overlay) {
    const show = () => document.body.classList.toggle("plain", !overlay.checked);
    overlay.addEventListener("change", show);
    show();
  }
  document.documentElement.dataset.ready = "true";
})();
