"""Finds wgmma instructions of a cubin whose operand descriptor ptxas has lost.

ptxas 12.8 (in Triton 3.6) drops the definition of some descriptors that do not change in a loop,
and leaves whatever the register holds: on the GPU "Invalid __shared__ read" or wrong products. A
descriptor's upper word is a constant of the layout, so constants are propagated through the machine
code: where none arrives, the definition is lost. Of 18 forms of a kernel that ran on an H200 this
told the 8 wrong ones from the 10 right ones (docs/gdn.md).
"""

import re
from typing import Dict, List

Value = object  # an int, or an unknown: ("?", number), ("xor", frozenset of unknowns)


class _Machine:
    """Values of the 32-bit registers and of the stack, as far as they are constants."""

    def __init__(self):
        self.registers: Dict[str, Value] = {}
        self.stack: Dict[int, Value] = {}
        self.unknowns = 0

    def unknown(self) -> Value:
        self.unknowns += 1
        return ("?", self.unknowns)

    def read(self, name: str) -> Value:
        if name in ("RZ", "URZ", "SRZ"):
            return 0
        if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", name):
            return int(name, 0) & 0xFFFFFFFF
        if re.fullmatch(r"U?R\d+", name):
            return self.registers.setdefault(name, self.unknown())
        return self.unknown()

    def write(self, name: str, *values: Value) -> None:
        for i, value in enumerate(values):
            self.registers[_next(name, i)] = value

    def total(self, names: List[str]) -> Value:
        values = [self.read(name) for name in names]
        if all(isinstance(value, int) for value in values):
            return sum(values) & 0xFFFFFFFF
        return self.unknown()

    def xor(self, a: str, b: str) -> Value:
        """ptxas swaps two registers with three of them."""
        terms = frozenset()
        for value in (self.read(a), self.read(b)):
            is_xor = isinstance(value, tuple) and value[0] == "xor"
            terms ^= value[1] if is_xor else frozenset([value] if value else [])
        if len(terms) < 2:
            return next(iter(terms), 0)
        return ("xor", terms)


def _next(register: str, count: int = 1) -> str:
    kind, number = re.fullmatch(r"(U?R)(\d+)", register).groups()
    return f"{kind}{int(number) + count}"


def _words(op: str) -> int:
    return 4 if ".128" in op else 2 if ".64" in op or "WIDE" in op else 1


def _stack_address(text: str) -> int:
    found = re.search(r"\[R1(?:\+(0x[0-9a-f]+))?\]", text)
    return int(found.group(1) or "0", 16) if found else -1


def _step(machine: _Machine, op: str, args: List[str], text: str) -> None:
    """One instruction that is no wgmma."""
    name, target = op.split(".")[0], args[0]
    if name == "STL":
        for i in range(_words(op)):
            value = 0 if args[1] == "RZ" else machine.read(_next(args[1], i))
            machine.stack[_stack_address(text) + 4 * i] = value
    if not re.fullmatch(r"U?R\d+", target):
        return
    if name == "LDL":
        at = _stack_address(text)
        words = [machine.stack.get(at + 4 * i, machine.unknown()) for i in range(_words(op))]
        machine.write(target, *words)
    elif name in ("MOV", "UMOV", "R2UR"):
        machine.write(target, machine.read(args[1]))
    elif name == "CS2R":
        machine.write(target, *[machine.read(args[1])] * 2)
    elif op in ("IMAD.MOV.U32", "IMAD.U32", "IMAD.MOV", "IMAD.X") and args[1:3] == ["RZ", "RZ"]:
        machine.write(target, machine.read(args[3]))
    elif op in ("IADD3.X", "UIADD3.X"):  # a carry out of the lower word does not occur
        machine.write(target, machine.total([x for x in args[1:] if not re.match(r"!?U?P", x)]))
    elif op == "UIADD3.64":
        pairs = [x for x in args[1:3] if x.lstrip("-").startswith("UR") and x != "URZ"]
        upper = machine.total([_next(x.lstrip("-")) for x in pairs])
        machine.write(target, machine.unknown(), upper)
    elif name in ("LOP3", "ULOP3") and "0x3c" in args:
        machine.write(target, machine.xor(args[1], args[2]))
    else:
        machine.write(target, *[machine.unknown() for _ in range(_words(op))])


def lost_descriptors(sass: str) -> List[str]:
    """Addresses of the wgmmas in the output of `nvdisasm -c` one of whose descriptors is lost."""
    if "GMMA" not in sass:  # not Hopper's machine code
        return []
    found = re.findall(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?\s*(\S+)\s*(.*?)\s*;", sass, re.M)
    machine, lost = _Machine(), set()
    for address, op, rest in found * 2:  # twice: loops carry registers round
        args = [x.strip().replace(".reuse", "") for x in rest.split(",")]
        if not op.startswith(("HGMMA", "QGMMA")):
            _step(machine, op, args, rest)
            continue
        first = re.search(r"gdesc\[UR(\d+)\]", rest)
        if first:  # of A and of B; an A from registers has none
            uppers = (3,) if re.fullmatch(r"R\d+", args[1]) else (1, 3)
            words = [machine.read(f"UR{int(first.group(1)) + i}") for i in uppers]
            if not all(isinstance(word, int) for word in words):
                lost.add(address)
        columns = int(re.match(r"[HQ]GMMA\.\d+x(\d+)x", op).group(1))
        machine.write(args[0], *[machine.unknown() for _ in range(columns // 2)])
    return sorted(lost, key=lambda address: int(address, 16))
