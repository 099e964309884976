"""A program for tests of the line protocol; its argument says how it misbehaves, and 'echo' that it does not.

It has no operation but those that give back what they are given.
"""

import json
import os
import sys
import time
from typing import Any

HOW = [*sys.argv, "echo"][1]
CAPABILITIES = {
    "name": "odd",
    "operations": {"bfp.store": {}, "offload.trace": {}, "packing.pack": {}, "offload.engine": {}, "linear.qgemm": {
        "arithmetic": {"form": "factored", "accumulator": "float32", "roundings": "one_loop"}}},
    "concurrent": True,
    "prepare": HOW != "unprepared",
}  # fmt: skip
alive: list[str] = []


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def result(request: dict[str, Any]) -> Any:
    if request["do"] == "capabilities":
        return CAPABILITIES
    if request["do"] in ("prepare", "open"):
        alive.append(f"handle {request['id']}")
        return alive[-1]
    if request["do"] in ("release", "close"):
        alive.remove(request["handle"])
        return None
    if request["do"] == "step":
        assert request["handle"] in alive
        return [request["handle"], request["arguments"]["request"]]
    if request["operation"] == "linear.qgemm":
        number = len(alive) if "handle" in request else len(request["arguments"])
        assert ("matrix" in request["arguments"]) == (HOW == "unprepared")
        return {"array": "<f4", "shape": [1, 1], "data": ["AAAAAA==", "AACAPw==", "AAAAQA==", "AABAQA=="][number]}
    given = request["arguments"]
    return given.get("blocks", given.get("requests", given.get("codes")))


def misbehave(request: dict[str, Any], line: str) -> None:
    match HOW:
        case "dies":
            os.kill(os.getpid(), 9)
        case "leaves":
            print("no more\nof this", file=sys.stderr)
            sys.exit(3)
        case "closes":
            os.close(1)
            time.sleep(600)
        case "garbage":
            say("Traceback (most recent call last):\n")
        case "bytes":
            os.write(1, b"\xff\xfe\n")
        case "nan":
            say(json.dumps({"id": request["id"], "result": float("nan")}) + "\n")
        case "deep":
            say(f'{{"id": {request["id"]}, "result": {"[" * 100000 + "]" * 100000}}}\n')
        case "other-id":
            say(json.dumps({"id": request["id"] + 1, "result": None}) + "\n")
        case "no-id":
            say(json.dumps({"result": None}) + "\n")
        case "more":
            say(line + line)
        case "long":
            while True:
                say("x" * 65536)
        case "kind":
            say(json.dumps({"id": request["id"], "error": {"kind": "unkind", "message": ""}}) + "\n")
        case "no-value":
            say(json.dumps({"id": request["id"], "result": {"array": "<f4", "shape": [2], "data": "AAA="}}) + "\n")
        case "argument" | "not declared" | "failed":
            say(json.dumps({"id": request["id"], "error": {"kind": HOW, "message": "for\nno reason"}}) + "\n")
        case "hangs":
            time.sleep(600)
        case "shouts":
            sys.stderr.write("y" * 300000)
            say(line)
        case _:
            say(line)


def main() -> None:
    if HOW == "early":
        say("ready\n")
    if HOW == "silent":
        time.sleep(600)
    for text in sys.stdin:
        request = json.loads(text)
        assert request["lowbit"] == 1
        line = json.dumps({"id": request["id"], "result": result(request)}) + "\n"
        if request["do"] == "run" and request["operation"] == "packing.pack":
            misbehave(request, line)
        else:
            say(line)


if __name__ == "__main__":
    main()
