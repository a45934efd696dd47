"""Fan-out: an orchestrator spreads one root intent over workers, collects every result, and prints the tree.

    python examples/fan_out.py [store URL]        # default: file:./data/fan_out

Run it twice: the second time, what carries an idempotency key is answered from the cache, and no worker is asked.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid

from covenant import CovenantError, Idempotency, Json, Mailbox, OpenMailbox, Result, Task, Text, TreeNode

CITIES = ["Aarhus", "Bergen", "Cork", "Delft", "Évora"]
WORKERS = ["north@lab", "south@lab"]


async def work(box: OpenMailbox, name: str) -> None:
    """Lease, do, answer; until the program ends."""
    me = box.of(name)
    while True:
        delivery = await me.recv_task()
        await me.send_result(Result.partial(delivery, [Text("looking it up")]))
        city = delivery.task.intent_text.removeprefix("describe ")
        answer = {"city": city, "letters": len(city), "by": name, "attempt": delivery.attempt}
        await me.send_result(Result.ok(delivery, [Text(f"{city} has {len(city)} letters"), Json(answer)]))


async def orchestrate(box: OpenMailbox) -> None:
    me = box.of("orchestrator@lab")
    root = str(uuid.uuid4())  # the intent itself is no task: children may hang on any id
    print(f"root intent {root}")
    open_tasks: set[str] = set()
    for number, city in enumerate(CITIES):
        worker = box.of(WORKERS[number % len(WORKERS)]).agent
        task = Task(
            recipient=worker,
            intent_text=f"describe {city}",
            task_kind="describe",
            parent=root,
            idempotency=Idempotency("idempotent", key=city),
        )
        sent = await me.send_task(task)
        open_tasks.add(sent.task_id)
        print(f"  sent    {city:8} to {worker}{'  (answered from the cache)' if sent.replayed else ''}")
    while open_tasks:
        answer = await me.recv_result()
        note = "replayed" if answer.replayed else f"attempt {answer.attempt}"
        text = next(block.text for block in answer.content if isinstance(block, Text))
        print(f"  {answer.status:7} {text}  (generation {answer.generation}, {note})")
        if answer.is_final:
            open_tasks.discard(answer.task_id)
    tree = await me.task_tree(root)
    print(f"\ntree of {tree.size - 1} tasks:")
    show(tree.root, 0)


def show(node: TreeNode, depth: int) -> None:
    if node.entry is None:
        print(f"{'  ' * depth}{node.id}  (the root intent)")
    else:
        entry = node.entry
        print(f"{'  ' * depth}{node.id}  {entry.state:9} {entry.task.intent_text!r} -> {entry.task.recipient}")
    for child in node.children:
        show(child, depth + 1)


async def main(url: str) -> None:
    async with Mailbox.open(url) as box:
        workers = [asyncio.create_task(work(box, name)) for name in WORKERS]
        try:
            await orchestrate(box)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    if url.startswith("file:"):
        print(
            f"\nEvery step is a line in {url.removeprefix('file:')}/journal-*.jsonl; run this again to see the cache."
        )


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s")
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "file:./data/fan_out"))
    except CovenantError as refusal:
        sys.exit(f"{refusal.code}: {refusal}")
