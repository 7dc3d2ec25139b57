"""A GPU for kernels without one: interprets the PTX that the compiler made, warp by warp, on numpy arrays.

Enough of PTX for the kernels of the dense convolution. Warps run one after the other from barrier to barrier, in a
random order; what is asynchronous reads and lands as late as it may; shared memory starts as NaN; every access is
checked against the memory it may touch: what a real GPU would forgive by luck fails here.
"""

import re
import struct
from dataclasses import dataclass

import numpy as np

LANES = 32
BASE = 1 << 40  # of global memory; shared memory starts at SHARED
SHARED = 1 << 10
PARAMETERS = 1 << 50
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {16: np.int16, 32: np.int32, 64: np.int64}
GARBAGE = np.full(LANES, 0xFFFFFFFFFFFFFFFF, np.uint64)
GROUP, QUAD = np.arange(LANES) // 4, np.arange(LANES) % 4


class Memory:
    """Global memory: tensors placed far from each other, so that an access beyond one is an error."""

    def __init__(self):
        self.blocks = []

    def place(self, data: bytes) -> int:
        last, block = self.blocks[-1] if self.blocks else (BASE, b"")
        address = last + (len(block) // 512 + 16) * 512
        self.blocks.append((address, np.frombuffer(data, np.uint8).copy()))
        return address

    def find(self, address: int, size: int):
        for start, block in self.blocks:
            if start <= address and address + size <= start + len(block):
                return block, address - start
        raise AssertionError(f"global access of {size} bytes at {address - BASE:+d} is outside every tensor")

    def read(self, address: int, size: int) -> np.ndarray:
        block, at = self.find(address, size)
        return block[at : at + size]

    def write(self, address: int, data: np.ndarray) -> None:
        block, at = self.find(address, len(data))
        block[at : at + len(data)] = data


def tensor_parameter(address: int, shape, strides) -> bytes:
    """A tensor as a kernel takes it: pointer, extents in 32 bits, then strides in 64; what is static is left out."""
    packed = struct.pack("<Q", address) + b"".join(struct.pack("<i", extent) for extent in shape)
    if strides:
        packed += b"\0" * (-len(packed) % 8) + b"".join(struct.pack("<q", stride) for stride in strides)
    return packed + b"\0" * (-len(packed) % 8)


@dataclass
class TensorMap:
    """What a bulk copy reads: extents and byte strides from the innermost axis on, the box that one copy takes."""

    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all have arrived and all announced bytes have come."""

    count: int
    missing: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase ^ 1, self.count


class Program:
    """A kernel's instructions; labels are positions."""

    def __init__(self, text: str):
        body = text[text.index("{", text.index(".entry")) + 1 : text.rindex("}")]
        body = re.sub(r"//[^\n]*", "", body)
        waits = r"LAB_WAIT:\s*mbarrier\.try_wait\S* P1, (\[[^\]]*\]), (%r\d+)[^;]*;.*?DONE:"
        body = re.sub(waits, r"mbarrier.wait \1, \2;", body, flags=re.DOTALL)
        body = re.sub(r"(?m)^\s*[{}]\s*$", "", body)
        self.code, self.labels = [], {}
        for word in re.split(r";|(?<=:)\s*\n", body):
            word = " ".join(word.split())
            while match := re.match(r"(\$\w+):\s*", word):
                self.labels[match[1]] = len(self.code)
                word = word[match.end() :]
            if not word or word.startswith((".reg", ".pragma")):
                continue
            guard = re.match(r"@(!?)(%p\d+) ", word)
            if guard:
                word = word[guard.end() :]
            op, _, rest = word.partition(" ")
            operands = [part.strip() for part in re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,{}\[\]]+", rest) if part.strip()]
            self.code.append((op, operands, (guard[2], guard[1] == "!") if guard else None))
        head = text[text.index(".entry") : text.index("{", text.index(".entry"))]
        found = re.findall(r"\.param[^,)]*?(\w+_param_\d+)(?:\[(\d+)\])?", head)
        self.parameters, self.sizes = [name for name, _ in found], [int(size or 4) for _, size in found]
        self.threads = int(re.search(r"\.reqntid (\d+)", head)[1])


class Block:
    """One thread block."""

    def __init__(self, program: Program, memory: Memory, parameters: list, threads: int, block: int, seed: int):
        self.program, self.memory, self.index = program, memory, block
        self.parameters = dict(zip(program.parameters, parameters, strict=True))
        self.shared = np.full(232448, 0xFF, np.uint8)
        self.warps = [Warp(self, number) for number in range(threads // LANES)]
        self.barriers = {}
        self.order = np.random.default_rng(seed)

    def run(self) -> None:
        while alive := [warp for warp in self.warps if not warp.done]:
            ready = [warp for warp in alive if not warp.at_barrier]
            if not ready:
                assert len(alive) == len(self.warps), "some warps left while others wait at a barrier"
                for warp in alive:
                    warp.at_barrier = False
                continue
            moved = [ready[number].run() for number in self.order.permutation(len(ready))]
            assert any(moved), "every warp waits for another"


class Warp:
    """32 threads, each with its own place in the program; the hindmost run first."""

    def __init__(self, block: Block, number: int):
        self.block, self.number = block, number
        self.registers, self.at = {}, np.zeros(LANES, np.int64)
        self.alive = np.ones(LANES, bool)
        self.pending, self.groups = [], []
        self.products, self.product_groups = [], []
        self.at_barrier = False

    @property
    def done(self) -> bool:
        return not self.alive.any()

    def run(self) -> bool:
        """Until the next barrier, an arrival, a wait that is not over, or the end; whether anything was done."""
        code, moved = self.block.program.code, False
        while self.alive.any():
            place = int(self.at[self.alive].min())
            self.mask = self.alive & (self.at == place)
            op, operands, guard = code[place]
            self.at[self.mask] += 1
            if guard:
                taken = self.value(guard[0], "pred") ^ guard[1]
                self.mask = self.mask & taken
            if op.startswith(("bar.sync", "barrier.sync")):
                assert (self.mask == self.alive).all(), "a barrier that not all threads of a warp reach"
                self.at_barrier = True
                return True
            if op == "mbarrier.wait" and not self.is_over(*operands):
                self.at[self.mask] -= 1
                return moved
            moved = True
            if self.mask.any():
                self.execute(op, operands)
                if op.startswith("mbarrier.arrive.shared"):  # who waited for it may go on before this warp does
                    return True
        return True

    def value(self, operand: str, kind: str) -> np.ndarray:
        """The bits of an operand as an array of a kind: b16, s32, f32, pred."""
        if kind == "pred":
            return self.registers[operand.removeprefix("!")] ^ operand.startswith("!")
        bits = int(kind[1:])
        if operand.startswith("%"):
            lane = np.arange(LANES)
            special = {"%tid.x": lane + LANES * self.number, "%laneid": lane, "%ctaid.x": 0 * lane + self.block.index}
            assert operand in special or operand[-1].isdigit(), operand
            # half of a pair may never be written, and then is not looked at
            raw = special[operand] if operand in special else self.registers.get(operand, GARBAGE)
        elif operand.startswith("0f"):
            raw = np.full(LANES, int(operand[2:], 16))
        elif operand.startswith("0x"):
            raw = np.full(LANES, int(operand, 16))
        elif operand in self.block.parameters:
            raw = np.full(LANES, PARAMETERS + list(self.block.parameters).index(operand))
        elif operand.startswith("__dynamic_shmem"):
            raw = np.full(LANES, SHARED)
        else:
            raw = np.full(LANES, int(operand) & (1 << bits) - 1, np.uint64)
        raw = raw.astype(UNSIGNED[bits])
        if kind[0] == "s":
            return raw.view(SIGNED[bits])
        if kind[0] == "f":
            return raw.view({16: np.float16, 32: np.float32, 64: np.float64}[bits])
        return raw

    def put(self, name: str, value: np.ndarray) -> None:
        if value.dtype != bool:
            value = np.ascontiguousarray(value).view(UNSIGNED[value.dtype.itemsize * 8])
        old = self.registers.get(name)
        self.registers[name] = value.copy() if old is None else np.where(self.mask, value, old)

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        kind = "u64" if base.startswith("%rd") else "u32"
        return self.value(base, kind).astype(np.int64) + int(offset or 0)

    def memory_of(self, op: str, address: int, size: int) -> np.ndarray:
        if ".shared" not in op:
            return self.block.memory.read(address, size)
        at = address - SHARED
        assert 0 <= at and at + size <= len(self.block.shared), f"{op} outside shared memory"
        return self.block.shared[at : at + size]

    def execute(self, op: str, operands: list[str]) -> None:
        name, *details = op.split(".")
        if special := getattr(self, f"do_{name}", None):
            special(op, details, operands)
            return
        kind = details[-1]
        target, *sources = operands
        given = [self.value(source, kind) for source in sources]
        with np.errstate(all="ignore"):
            self.put(target, ARITHMETIC[name](details, *given))

    def do_griddepcontrol(self, op, details, operands):
        pass

    do_fence = do_prefetch = do_griddepcontrol

    def do_elect(self, op, details, operands):
        self.put(operands[0].split("|")[1], np.arange(LANES) == np.flatnonzero(self.mask)[0])

    def do_cvta(self, op, details, operands):
        self.put(operands[0], self.value(operands[1], "u64"))

    def is_over(self, place: str, parity: str) -> bool:
        assert (self.mask == self.alive).all()
        barrier = self.block.barriers[int(self.address(place)[self.mask][0])]
        return barrier.phase != self.value(parity, "u32")[self.mask][0]

    def do_mbarrier(self, op, details, operands):
        if details[0] == "wait":
            return
        where = self.address(operands[0] if details[0] == "init" else operands[1])
        for lane in np.flatnonzero(self.mask):
            place = int(where[lane])
            if details[0] == "init":
                count = int(self.value(operands[1], "u32")[lane])
                self.block.barriers[place] = Barrier(count, count)
                continue
            barrier = self.block.barriers[place]
            if "expect_tx" in details:
                barrier.bytes += int(self.value(operands[2], "u32")[lane])
            barrier.missing -= 1
            assert barrier.missing >= 0, "more arrivals than a phase has"
            barrier.settle()

    def do_ret(self, op, details, operands):
        self.alive &= ~self.mask

    def do_bra(self, op, details, operands):
        self.at[self.mask] = self.block.program.labels[operands[0]]

    def do_setp(self, op, details, operands):
        a, b = (self.value(operand, details[-1]) for operand in operands[1:])
        self.put(operands[0], COMPARE[details[0].removesuffix("u")](a, b))

    def do_selp(self, op, details, operands):
        a, b = (self.value(operand, details[-1]) for operand in operands[1:3])
        self.put(operands[0], np.where(self.value(operands[3], "pred"), a, b))

    def do_mov(self, op, details, operands):
        kind, (target, source) = details[-1], operands
        if kind == "pred":
            self.put(target, self.value(source, kind) if source.startswith("%") else np.full(LANES, source == "-1"))
        elif source.startswith("{") and kind == "b64":
            low, high = (self.value(part.strip(), "u32").astype(np.uint64) for part in source.strip("{}").split(","))
            self.put(target, low | high << 32)
        elif source.startswith("{"):
            low, high = (self.value(part.strip(), "u16").astype(np.uint32) for part in source.strip("{}").split(","))
            self.put(target, low | high << 16)
        elif target.startswith("{"):
            half, bits = (np.uint32, 32) if kind == "b64" else (np.uint16, 16)
            for number, part in enumerate(target.strip("{}").split(",")):
                self.put(part.strip(), (self.value(source, kind) >> (bits * number)).astype(half))
        else:
            self.put(target, self.value(source, kind))

    def do_prmt(self, op, details, operands):
        a, b, selector = (self.value(operand, "u32").astype(np.uint64) for operand in operands[1:])
        both, out = a | b << 32, np.zeros(LANES, np.uint64)
        for byte in range(4):
            choice = selector >> (4 * byte) & 15
            assert (choice < 8).all(), "a sign is not replicated here"
            out |= (both >> (8 * choice) & 0xFF) << (8 * byte)
        self.put(operands[0], out.astype(np.uint32))

    def do_shfl(self, op, details, operands):
        assert self.mask.all()
        value, by = self.value(operands[1], "u32"), self.value(operands[2], "u32").astype(np.int64)
        source = np.arange(LANES) ^ by if "bfly" in details else by
        self.put(operands[0].split("|")[0], value[source])

    def do_cvt(self, op, details, operands):
        to, from_ = details[-2:]
        rounded = "rn" in details
        if to == "bf16x2":
            high, low = (bf16(self.value(operand, "f32")) for operand in operands[1:])
            self.put(operands[0], low.astype(np.uint32) | high.astype(np.uint32) << 16)
        elif to == "f16x2":
            high, low = (self.value(operand, "f32").astype(np.float16).view(np.uint16) for operand in operands[1:])
            self.put(operands[0], low.astype(np.uint32) | high.astype(np.uint32) << 16)
        elif to == "bf16":
            self.put(operands[0], bf16(self.value(operands[1], "f32")))
        elif "rzi" in details and to[0] == "f":
            self.put(operands[0], np.trunc(self.value(operands[1], from_)))
        elif from_ == "bf16":
            self.put(operands[0], (self.value(operands[1], "u16").astype(np.uint32) << 16).view(np.float32))
        else:
            assert rounded or to[0] != "f" or int(to[1:]) > int(from_[1:]), op
            dtype = {"f": {16: np.float16, 32: np.float32}, "u": UNSIGNED, "s": SIGNED}[to[0]][int(to[1:])]
            self.put(operands[0], self.value(operands[1], from_).astype(dtype))

    def do_mul(self, op, details, operands):
        kind = details[-1]
        a, b = (self.value(operand, kind) for operand in operands[1:])
        with np.errstate(all="ignore"):
            if details[0] == "wide":
                self.put(operands[0], a.astype(np.int64 if kind[0] == "s" else np.uint64) * b)
            elif details[0] == "hi":
                wide = np.array([int(x) * int(y) >> 32 & 0xFFFFFFFF for x, y in zip(a, b, strict=True)], np.uint32)
                self.put(operands[0], wide)
            else:
                self.put(operands[0], a * b)

    def do_mad(self, op, details, operands):
        a, b = (self.value(operand, details[-1]) for operand in operands[1:3])
        with np.errstate(all="ignore"):
            if details[0] == "wide":
                self.put(operands[0], a.astype(np.int64) * b + self.value(operands[3], "s64"))
            else:
                self.put(operands[0], a * b + self.value(operands[3], details[-1]))

    def do_ld(self, op, details, operands):
        names = [name.strip() for name in operands[0].strip("{}").split(",")]
        bits = int(details[-1][1:])
        size = bits // 8
        if details[0] == "param":
            name, _, offset = operands[1].strip("[]").partition("+")
            data = self.block.parameters[name]
            for number, target in enumerate(names):
                at = int(offset or 0) + number * size
                value = np.frombuffer(data[at : at + size], UNSIGNED[bits])
                self.put(target, np.repeat(value, LANES))
            return
        values = np.zeros((len(names), LANES), UNSIGNED[bits])
        where = self.address(operands[1])
        for lane in np.flatnonzero(self.mask):
            assert where[lane] % (size * len(names)) == 0, f"{op} at an unaligned address"
            values[:, lane] = self.memory_of(op, int(where[lane]), size * len(names)).view(UNSIGNED[bits])
        for target, value in zip(names, values, strict=True):
            self.put(target, value)

    def do_st(self, op, details, operands):
        names = [name.strip() for name in operands[1].strip("{}").split(",")]
        kind = "u" + details[-1][1:]
        values = np.stack([self.value(name, kind) for name in names])
        where = self.address(operands[0])
        for lane in np.flatnonzero(self.mask):
            data = np.ascontiguousarray(values[:, lane]).view(np.uint8)
            assert where[lane] % len(data) == 0, f"{op} at an unaligned address"
            if ".shared" in op:
                self.memory_of(op, int(where[lane]), len(data))[:] = data
            else:
                self.block.memory.write(int(where[lane]), data)

    def do_cp(self, op, details, operands):
        if "tensor" in details:
            self.copy_box(operands)
        elif "commit_group" in op:
            self.groups.append(self.pending)
            self.pending = []
        elif "wait_group" in op:
            while len(self.groups) > int(operands[0]):
                for target, data in self.groups.pop(0):
                    self.memory_of(".shared", target, len(data))[:] = data
        else:
            size, exists = int(operands[2]), self.value(operands[3], "s32")
            to, source = self.address(operands[0]), self.address(operands[1])
            for lane in np.flatnonzero(self.mask):
                assert to[lane] % size == source[lane] % size == 0, f"{op} at an unaligned address"
                data = np.zeros(size, np.uint8)
                if exists[lane]:
                    data[: exists[lane]] = self.block.memory.read(int(source[lane]), int(exists[lane]))
                self.memory_of(".shared", int(to[lane]), size)[:] = 0xFF
                self.pending.append((int(to[lane]), data))

    def copy_box(self, operands: list[str]) -> None:
        """A box of a tensor to shared memory, swizzled or in rows of one vector; what lies outside the tensor is 0."""
        (lane,) = np.flatnonzero(self.mask)
        source, _, coordinates = operands[1].strip("[]").partition(", ")
        to, signal = (int(self.address(operand)[lane]) for operand in (operands[0], operands[2]))
        parameter = list(self.block.parameters.values())[int(self.value(source, "u64")[lane]) - PARAMETERS]
        start = [int(self.value(name.strip(), "s32")[lane]) for name in coordinates.strip("{}").split(",")]
        width, rows = parameter.box[0], int(np.prod(parameter.box[1:]))
        pieces = width // 8
        assert (pieces, to % 1024) == (8, 0) or (pieces, to % 128) == (1, 0), "another box"
        assert start[0] % 8 == 0, "a box begins at a multiple of 16 bytes, or the instruction is illegal"
        for row in range(rows):
            second = row % parameter.box[1]
            at = [start[0], start[1] + second, start[2] + row // parameter.box[1]]
            line = np.zeros(width, np.uint16)
            outer = sum(place * step for place, step in zip(at[1:], parameter.strides[1:], strict=True))
            if all(0 <= place < extent for place, extent in zip(at[1:], parameter.extents[1:], strict=True)):
                first, last = max(0, -at[0]), min(width, parameter.extents[0] - at[0])
                if first < last:
                    begin = parameter.address + outer + 2 * (at[0] + first)
                    line[first:last] = self.block.memory.read(begin, 2 * (last - first)).view(np.uint16)
            for piece in range(pieces):
                place = to + 16 * (pieces * row + piece)
                place = swizzled(place) if pieces == 8 else place
                self.memory_of(".shared", place, 16)[:] = line[8 * piece : 8 * piece + 8].view(np.uint8)
        barrier = self.block.barriers[signal]
        barrier.bytes -= 2 * width * rows
        barrier.settle()

    def do_wgmma(self, op, details, operands):
        assert self.mask.all()
        if details[0] == "commit_group":
            self.product_groups.append(self.products)
            self.products = []
        elif details[0] == "wait_group":
            while len(self.product_groups) > int(operands[0]):
                for product in self.product_groups.pop(0):
                    self.multiply(*product)
        elif details[0] == "mma_async":
            target, a, b, *options, turned = operands
            assert options == ["p", "1", "1", "0"][: 3 if a.startswith("{") else 4] and self.value("p", "pred").all()
            names = [name.strip() for name in target.strip("{}").split(",")]
            for name in names:  # until it was waited for, nobody may look at it
                self.registers.setdefault(name, GARBAGE)
            # registers are read when the product is made, so that one may not be written before
            source = a if a.startswith("{") else int(self.value(a, "u64")[0])
            self.products.append((names, source, int(self.value(b, "u64")[0]), turned == "1", details[-1]))

    def multiply(self, names: list[str], a: int | str, b: int, turned: bool, kind: str) -> None:
        """Rows 16 w .. + 16 of a product, w the warp in its group. A [64, 16] and B [N, 16] lie by rows, in eights;
        or, `turned`, B lies by columns, in pieces of 64. A may be in registers, a warp's rows in its own.
        """
        columns = len(names) * 2
        base_b, next_b, group_b = descriptor(b)
        k = np.arange(16)[None, :]
        if isinstance(a, str):
            mA = self.rows_of([name.strip() for name in a.strip("{}").split(",")], kind)
        else:
            base_a, _, group_a = descriptor(a)
            rows = 16 * (self.number % 4) + np.arange(16)[:, None]
            mA = self.halves(base_a + rows // 8 * group_a + rows % 8 * 128 + 2 * k, kind)
        n = np.arange(columns)[None, :]
        by_columns = base_b + n // 64 * next_b + n % 64 * 2 + k.T % 8 * 128 + k.T // 8 * group_b
        by_rows = base_b + n // 8 * group_b + n % 8 * 128 + 2 * k.T
        mB = self.halves(by_columns if turned else by_rows, kind)
        product = mA @ mB
        for number, name in enumerate(names):
            row, column = GROUP + 8 * (number // 2 % 2), 8 * (number // 4) + 2 * QUAD + number % 2
            value = self.registers[name].astype(np.uint32).view(np.float32) + product[row, column]
            self.registers[name] = value.view(np.uint32)

    def rows_of(self, names: list[str], kind: str) -> np.ndarray:
        """A [16, 16] of a product that a warp holds in four registers."""
        mA = np.zeros((16, 16), np.float32)
        for number, name in enumerate(names):
            for side, value in enumerate(pair(self.value(name, "u32"), kind)):
                mA[GROUP + 8 * (number % 2), 2 * QUAD + side + 8 * (number // 2)] = value
        return mA

    def halves(self, where: np.ndarray, kind: str) -> np.ndarray:
        """16-bit elements of swizzled shared memory in fp32."""
        words = self.block.shared.view(np.uint16)[(swizzled(where) - SHARED) // 2]
        return pair(words.astype(np.uint32), kind)[0]

    def do_ldmatrix(self, op, details, operands):
        assert self.mask.all()
        where = self.address(operands[1])
        assert (where % 16 == 0).all(), f"{op} at an unaligned address"
        for number, target in enumerate(operands[0].strip("{}").split(",")):
            rows = np.stack([self.memory_of(".shared", int(where[8 * number + row]), 16) for row in range(8)])
            matrix = rows.view(np.uint16)
            matrix = matrix.T if "trans" in details else matrix
            low, high = (matrix[GROUP, 2 * QUAD + half].astype(np.uint32) for half in (0, 1))
            self.put(target.strip(), low | high << 16)

    def do_mma(self, op, details, operands):
        assert self.mask.all() and "m16n8k16" in details
        d, a, b, c = ([name.strip() for name in operand.strip("{}").split(",")] for operand in operands)
        half = details[-2]
        mA, mB, mC = self.rows_of(a, half), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
        for number, name in enumerate(b):
            for side, value in enumerate(pair(self.value(name, "u32"), half)):
                mB[2 * QUAD + side + 8 * number, GROUP] = value
        for number, name in enumerate(c):
            mC[GROUP + 8 * (number // 2), 2 * QUAD + number % 2] = self.value(name, "f32")
        mC = mC + mA @ mB
        for number, name in enumerate(d):
            self.put(name, mC[GROUP + 8 * (number // 2), 2 * QUAD + number % 2])


def swizzled(place):
    """Where a byte lies in the 128-byte swizzle: 16-byte pieces change places by the row of eight."""
    return place ^ (place >> 7 & 7) << 4


def descriptor(bits: int) -> tuple[int, int, int]:
    """(first byte, leading and stride offset in bytes) of a matrix in shared memory."""
    assert bits >> 62 == 1 and bits >> 49 & 7 == 0, "another swizzle"
    return tuple((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))


def pair(words: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Both halves of 32-bit words in fp32."""
    halves = (words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)
    if kind == "bf16":
        return tuple((each.astype(np.uint32) << 16).view(np.float32) for each in halves)
    return tuple(each.view(np.float16).astype(np.float32) for each in halves)


def bf16(value: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even."""
    bits = value.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), rounded)


def shifted(value: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    bits = value.dtype.itemsize * 8
    by = np.minimum(by.astype(np.uint64) & 0xFFFFFFFF, bits)
    near = np.minimum(by, bits - 1).astype(value.dtype)
    if left:
        return np.where(by == bits, 0, value << near).astype(value.dtype)
    moved = value >> near
    return moved if value.dtype.kind == "i" else np.where(by == bits, 0, moved).astype(value.dtype)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(b == 0, 0, np.trunc(a.astype(np.float64) / np.where(b == 0, 1, b))).astype(a.dtype)


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
ARITHMETIC = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "div": lambda _, a, b: a / b if a.dtype.kind == "f" else divide(a, b),
    "rem": lambda _, a, b: a - b * divide(a, b),
    "neg": lambda _, a: -a,
    "abs": lambda _, a: np.abs(a),
    "not": lambda _, a: ~a,
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "min": lambda _, a, b: np.fmin(a, b),
    "max": lambda _, a, b: np.fmax(a, b),
    "copysign": lambda _, a, b: np.copysign(b, a),
    "fma": lambda _, a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype),
    "shl": lambda _, a, b: shifted(a, b, True),
    "shr": lambda _, a, b: shifted(a, b, False),
    "shf": lambda _, a, b, c: ((a.astype(np.uint64) | b.astype(np.uint64) << 32) >> (c & 31)).astype(np.uint32),
    "ex2": lambda _, a: np.exp2(a),
    "rcp": lambda _, a: (1 / a).astype(a.dtype),
}
