"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (name, properties = {}, children = []) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  for (const { group, title, data: traces, layout } of data.charts) {
    const plot = element("div", { className: "chart" });
    const head = element("h3", { textContent: title });
    document.getElementById(group).append(element("article", {}, [head, plot]));
    Plotly.newPlot(plot, traces, layout, { responsive: true, displaylogo: false });
  }

  const [run, step, colour, list, legend] = ["run", "step", "colour", "sample-list", "legend"].map(
    (id) => document.getElementById(id),
  );
  const unique = (values) => [...new Set(values)];
  const fill = (select, options) => {
    const before = select.value;
    select.replaceChildren(
      ...options.map(([value, text]) => element("option", { value, textContent: text })),
    );
    select.value = options.some(([value]) => value === before) ? before : options.at(-1)?.[0] ?? "";
  };
  const names = { eval: "evaluation after step", train: "training batch of step" };
  const ofRun = () => data.samples.filter((sample) => sample.run === run.value);

  // A token that was likely is white; one of exp(-5) or less is red.
  const byLogprob = (logprob) => `rgb(213 94 0 / ${Math.min(1, Math.max(0, -logprob / 5))})`;
  const byAdvantage = (advantage, most) => {
    const share = most > 0 ? Math.abs(advantage) / most : 0;
    return `rgb(${advantage < 0 ? "213 94 0" : "0 114 178"} / ${0.75 * share})`;
  };

  // The turns of an episode: what the policy writes, and what it is answered.
  const shownCompletion = (sample) => sample.turns.length
    ? sample.turns.map(({ role, text }) => `${role === "policy" ? "\u2192" : "\u2190"} ${text}`).join(" ")
    : `\u2192 ${sample.completion}`;

  const showTokens = (sample, most) => {
    const usesAdvantage = colour.value === "advantage" && sample.advantage !== null;
    const tokens = sample.tokens.map((token, index) => {
      const logprob = sample.logprobs[index];
      if (sample.sampled.length && !sample.sampled[index]) {
        return element("span", {
          className: "observation", textContent: token, title: "of the environment, not sampled",
        });
      }
      const made = element("span", { className: "token", textContent: token });
      made.title = `log-probability ${logprob}` +
        (sample.advantage === null ? "" : `, advantage ${sample.advantage.toFixed(3)}`);
      made.style.background = usesAdvantage
        ? byAdvantage(sample.advantage, most) : byLogprob(logprob);
      return made;
    });
    const count = sample.sampled.length ? sample.sampled.filter(Boolean).length : sample.tokens.length;
    const turns = sample.turns.filter((turn) => turn.role === "policy").length;
    const facts = [`${count} tokens`, `answer ${sample.answer}`];
    if (turns) facts.unshift(`${turns} turns`);
    if (sample.advantage !== null) facts.push(`advantage ${sample.advantage.toFixed(3)}`);
    return element("div", { className: "tokens" }, [
      element("div", { className: "facts", textContent: facts.join(", ") }),
      element("span", { className: "prompt", textContent: sample.prompt }),
      ...tokens,
    ]);
  };

  const showSamples = () => {
    const shown = ofRun().filter((sample) => `${sample.kind} ${sample.step}` === step.value);
    const most = Math.max(0, ...shown.map((sample) => Math.abs(sample.advantage ?? 0)));
    const hasAdvantages = shown.some((sample) => sample.advantage !== null);
    colour.querySelector("[value=advantage]").disabled = !hasAdvantages;
    if (!hasAdvantages) colour.value = "logprob";
    legend.textContent = colour.value === "advantage"
      ? "Blue tokens have an advantage above 0, orange ones below: their completion's."
      : "The less likely a token was, the more orange it is: full at -5 nats. Click a sample.";
    list.replaceChildren(...shown.map((sample) => {
      const reward = element("span", {
        className: "reward", textContent: `reward ${+sample.reward.toFixed(4)}`,
      });
      const text = element("span", {
        className: "text", textContent: `${sample.prompt} ${shownCompletion(sample)}`,
      });
      const button = element("button", { type: "button", className: "sample" }, [reward, text]);
      const item = element("li", {}, [button]);
      button.setAttribute("aria-expanded", "false");
      button.addEventListener("click", () => {
        const open = item.querySelector(".tokens");
        button.setAttribute("aria-expanded", String(!open));
        if (open) open.remove();
        else item.append(showTokens(sample, most));
      });
      return item;
    }));
  };

  const showSteps = () => {
    const seen = unique(ofRun().map((sample) => `${sample.kind} ${sample.step}`));
    fill(step, seen.map((key) => {
      const [kind, number] = key.split(" ");
      return [key, `${names[kind]} ${number}`];
    }));
    showSamples();
  };

  fill(run, unique(data.samples.map((sample) => sample.run)).map((name) => [name, name]));
  if (run.options.length) run.selectedIndex = 0;
  document.getElementById("run-choice").hidden = run.options.length < 2;
  document.getElementById("samples").hidden = !data.samples.length;
  run.addEventListener("change", showSteps);
  step.addEventListener("change", showSamples);
  colour.addEventListener("change", () => {
    const open = [...list.children].map((item) => item.querySelector(".tokens") !== null);
    showSamples();
    open.forEach((was, index) => { if (was) list.children[index].firstChild.click(); });
  });
  showSteps();
})();
