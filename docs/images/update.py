"""Draws `update.svg`, the picture of one update in docs/architecture.md: `python docs/images/update.py`."""

from pathlib import Path
from xml.sax.saxutils import escape

# (group, what happens, where), from top to bottom
STEPS = [
    ("collect", "Collector.collect, for T decisions:", "collect/collector.py"),
    ("collect", "Policy.complete: log-probs, values [T, N]", "policies/policy.py"),
    ("collect", "reward terms, if there are any", "rewards/reward_model.py, added_rewards.py"),
    ("learn", "advantages and returns: GAE or V-trace", "algorithms/advantages.py"),
    ("learn", "first minibatch: parity gate, may stop the run", "algorithms/scoring.py"),
    ("learn", "epochs of minibatches: evaluate, loss", "algorithms/ppo.py, grpo.py"),
    ("learn", "backward, average, clip, Adam", "algorithms/gradient_step.py"),
    ("learn", "normaliser statistics; version + 1", "algorithms/ppo.py"),
    ("record", "metrics, videos, checkpoint, evaluation", "record/, runs/, evaluation/"),
]
OWNERS = {"collect": "one rollout", "learn": "Algorithm.update", "record": "Run"}
WIDTH, LEFT, BOX, HEIGHT, GAP, TOP = 470, 58, 340, 46, 14, 12
# the first box holds the loop of env and policy
INNER, ROWS = 92, 30
STYLE = """
  svg { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; color-scheme: light dark }
  .paper { fill: #ffffff } text { fill: #1f2328; font-size: 14px } .where { font-size: 11.5px; fill: #57606a;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace } .owner { font-size: 13px; font-weight: 600 }
  .box { stroke-width: 1.3 } .inner { fill: #ffffff; stroke: #6e7781 } path { fill: none; stroke: #6e7781;
  stroke-width: 1.6 } .tip { fill: #6e7781; stroke: none } .note { font-size: 12px; fill: #57606a }
  .collect { fill: #e8f1fd; stroke: #4a86d0 } .learn { fill: #fdf0e1; stroke: #cf8a32 }
  .record { fill: #e6f5ea; stroke: #3f9a59 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #131416 } text { fill: #e6e8eb } .where, .note { fill: #a3abb5 } path { stroke: #8b949e }
    .tip { fill: #8b949e } .inner { fill: #1b1e22; stroke: #8b949e }
    .collect { fill: #16263a } .learn { fill: #33240f } .record { fill: #14301d }
  }
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="box {kind}"/>'


def arrow(points: str, tip: tuple[float, float], towards: str) -> str:
    x, y = tip
    corners = {
        "up": f"{x - 5},{y + 8} {x + 5},{y + 8} {x},{y}",
        "down": f"{x - 5},{y - 8} {x + 5},{y - 8} {x},{y}",
        "left": f"{x + 8},{y - 5} {x + 8},{y + 5} {x},{y}",
        "right": f"{x - 8},{y - 5} {x - 8},{y + 5} {x},{y}",
    }
    return f'<path d="{points}"/><polygon points="{corners[towards]}" class="tip"/>'


def loop(top: float) -> list[str]:
    """Env and policy, inside of the first box."""
    width, y = 92, top + 46
    names = [("Policy.act", "action [C, A]"), ("Env.step", "next/*"), ("Buffer.add", "[T, N]")]
    parts, middle = [], y + ROWS / 2
    for number, (name, gives) in enumerate(names):
        x = LEFT + 14 + number * (width + 18)
        parts += [box(x, y, width, ROWS, "inner"), text(x + width / 2, middle + 5, name, "", "middle")]
        parts.append(text(x + width / 2, y + ROWS + 16, gives, "note", "middle"))
        if number:
            parts.append(arrow(f"M{x - 18},{middle} H{x - 6}", (x - 1, middle), "right"))
    left, right = LEFT + 14 + width / 2, LEFT + 14 + 2 * (width + 18) + width / 2
    back = y + ROWS + 24
    # from the buffer back to the policy
    parts.append(arrow(f"M{right},{back - 4} V{back + 6} H{left} V{back + 3}", (left, back - 5), "up"))
    parts.append(text((left + right) / 2, back + 20, "observation of the next decision", "note", "middle"))
    return parts


def draw() -> str:
    parts, y, spans = [], TOP, {}
    for number, (kind, what, where) in enumerate(STEPS):
        height = HEIGHT + INNER if number == 0 else HEIGHT
        parts += [box(LEFT, y, BOX, height, kind), text(LEFT + 12, y + 20, what)]
        parts.append(text(LEFT + 12, y + (37 if number else 36), where, "where"))
        if number == 0:
            parts += loop(y)
        spans[kind] = (spans.get(kind, (y, 0))[0], y + height)
        y += height + GAP
        if number + 1 < len(STEPS):
            parts.append(arrow(f"M{LEFT + BOX / 2},{y - GAP} V{y - 6}", (LEFT + BOX / 2, y - 1), "down"))
    for kind, (top, bottom) in spans.items():
        middle = (top + bottom) / 2
        if kind == "record":
            parts.append(text(LEFT - 12, middle + 4, OWNERS[kind], "owner", "end"))
        else:
            turn = f'transform="rotate(-90 {LEFT - 22} {middle})"'
            parts.append(text(LEFT - 22, middle, OWNERS[kind], "owner", "middle", turn))
            parts.append(f'<path d="M{LEFT - 8},{top} h-6 V{bottom} h6"/>')
    edge, bottom = LEFT + BOX + 32, y - GAP - HEIGHT / 2
    parts.append(
        arrow(f"M{LEFT + BOX},{bottom} H{edge} V{TOP + 24} H{LEFT + BOX + 6}", (LEFT + BOX + 1, TOP + 24), "left")
    )
    middle = (bottom + TOP) / 2
    turn = f'transform="rotate(-90 {edge + 18} {middle})"'
    parts.append(text(edge + 18, middle, "next rollout, with the new version of the weights", "note", "middle", turn))
    size, body = f'width="{WIDTH}" height="{y}"', "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" {size}>\n<style>{STYLE}</style>\n'
        f'<rect {size} rx="8" class="paper"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    print((Path(__file__).parent / "update.svg").write_text(draw()), "bytes")
