"""Checkpoints that would do something when loaded: every way we know of. Each leaves a canary if it ever runs."""

import io
import pickle
import struct
import zipfile

import torch


def command(canary):
    return f"touch {canary}"


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def _text(word):
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def _short(word):
    return b"\x8c" + bytes([len(word.encode())]) + word.encode()


def pickles(canary):
    """Name -> a pickle that runs a command, or tries to."""
    import os
    import subprocess

    run = command(canary)
    argument = _text(run)
    return {
        "reduce_protocol_0": pickle.dumps(Calls(os.system, run), 0),
        "reduce_protocol_2": pickle.dumps(Calls(os.system, run), 2),
        "reduce_protocol_4": pickle.dumps(Calls(os.system, run), 4),
        "reduce_protocol_5": pickle.dumps({"w": [Calls(os.system, run)]}, 5),
        "popen": pickle.dumps(Calls(subprocess.call, ["touch", str(canary)]), 2),
        "eval": pickle.dumps(Calls(eval, f"__import__('os').system({run!r})"), 4),
        "exec": pickle.dumps(Calls(exec, f"import os; os.system({run!r})"), 4),
        "stack_global_by_memo": b"\x80\x04" + _short("posix") + b"\x94" + _short("system") + b"\x94"
        + b"00h\x00h\x01\x93" + argument + b"\x85R.",
        "stack_global_by_dup": b"\x80\x04" + _short("posix") + b"2q\x000" + _short("system") + b"\x93" + argument
        + b"\x85R.",
        "inst": b"(" + b"S" + repr(run).encode() + b"\n" + b"iposix\nsystem\n.",
        "obj": b"(cposix\nsystem\n" + argument + b"o.",
        "newobj": b"\x80\x02csubprocess\nPopen\n(]" + _text("touch") + b"a" + _text(str(canary)) + b"at\x81.",
        "newobj_ex": b"\x80\x04" + _short("subprocess") + _short("Popen") + b"\x93(]" + _text("touch") + b"a"
        + _text(str(canary)) + b"at}\x92.",
        "dotted_name": b"\x80\x04" + _short("torch._utils") + _short("_rebuild_tensor_v2.__globals__") + b"\x93.",
        "dotted_system": b"\x80\x04" + _short("torch") + _short("os.system") + b"\x93" + argument + b"\x85R.",
        "hidden_after_stop": pickle.dumps({"w": 1}, 2) + pickle.dumps(Calls(os.system, run), 2),
        "popped_from_the_stack": b"\x80\x02cposix\nsystem\n" + argument + b"\x85R0N.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent_text": b"Pposix.system\n.",
        "getattr": pickle.dumps(Calls(getattr, "a", "upper"), 2),
        "build_with_slots": b"\x80\x02ccollections\nOrderedDict\n)R(N}" + _text("x") + b"K\x01stb.",
        "build_class": b"\x80\x02ccollections\nOrderedDict\n}b.",
        "codec": b"\x80\x02c_codecs\nencode\n" + _text("a") + _text("rot13") + b"\x86R.",
        "arguments_of_a_call": b"\x80\x02c_codecs\nencode\n]R.",
        "array_of_objects": b"\x80\x02cnumpy\ndtype\n" + _text("O8") + b"K\x00K\x01\x87R.",
        "flags_of_a_dtype": b"\x80\x02cnumpy\ndtype\n" + _text("f8") + b"K\x00K\x01\x87R(K\x03" + _text("<")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb.",
        "call_of_a_result": b"\x80\x02ccollections\nOrderedDict\n)R)R.",
        "call_of_a_type": b"\x80\x02cnumpy\nndarray\n)R.",
        "fill_a_type": b"\x80\x02cnumpy\nndarray\nK\x01a.",
        "mark_for_a_value": b"\x80\x02(2.",
        "torch_load": b"\x80\x02ctorch.serialization\nload\n" + argument + b"\x85R.",
        "hub": b"\x80\x02ctorch.hub\nload\n" + argument + b"\x85R.",
        "huge_memo": b"\x80\x02Nr\xff\xff\xff\xff.",
        "empty": b"",
        "no_stop": b"\x80\x02}",
        "underflow": b"\x80\x02R.",
    }  # fmt: skip


RUNS = (
    "reduce_protocol_0", "reduce_protocol_2", "reduce_protocol_4", "reduce_protocol_5", "popen", "eval", "exec",
    "stack_global_by_memo", "inst", "obj", "dotted_system", "popped_from_the_stack",
)  # fmt: skip
"""Those that Python's own loader proves to be evil."""


def weights():
    return torch.nn.Linear(3, 2).state_dict()


def torch_zip(path, **options):
    torch.save(weights(), path, **options)
    return path


def rewritten(path, change, **options):
    """A torch zip with its members changed: `change(members: list of (name, bytes))` gives the new list."""
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in change(members):
            archive.writestr(name, content)
    return path


def swapped(members, ending, content):
    return [(name, content if name.endswith(ending) else old) for name, old in members]


def archives(directory, canary):
    """Name -> a zip that is not what it seems."""
    evil = pickles(canary)["reduce_protocol_2"]
    made = {}

    def fresh(name):
        return torch_zip(directory / f"{name}.pt")

    made["evil_data_pkl"] = rewritten(fresh("evil_data_pkl"), lambda m: swapped(m, "data.pkl", evil))
    made["second_pickle"] = rewritten(fresh("second_pickle"), lambda m: [*m, (m[0][0].split("/")[0] + "/x.pkl", evil)])
    made["pickle_by_another_name"] = rewritten(fresh("pickle_by_another_name"), lambda m: [*m, ("a/code.txt", evil)])
    made["leaves_its_directory"] = rewritten(fresh("leaves_its_directory"), lambda m: [*m, ("../../x/data/0", b"")])
    made["absolute"] = rewritten(fresh("absolute"), lambda m: [*m, ("/etc/x", b"")])
    made["other_case"] = rewritten(fresh("other_case"), lambda m: [*m, (m[0][0].upper(), evil)])
    bomb = b"\x80\x02X" + struct.pack("<I", 10 << 20) + b"a" * (10 << 20) + b"."
    made["bomb"] = rewritten(
        fresh("bomb"), lambda m: swapped(m, "data.pkl", bomb), compression=zipfile.ZIP_DEFLATED, compresslevel=9
    )
    for name, change in {
        "pickle_in_front": lambda data: evil + data,
        "bytes_behind": lambda data: data + b"\0" * 64,
        "cut": lambda data: data[: len(data) // 2],
        "wrong_name_in_header": lambda data: data.replace(b"data.pkl", b"datb.pkl", 1),
        "wrong_checksum": _flipped,
    }.items():
        path = fresh(name)
        path.write_bytes(change(path.read_bytes()))
        made[name] = path
    made["comment"] = fresh("comment")
    with zipfile.ZipFile(made["comment"], "a") as archive:
        archive.comment = b"PK\x05\x06" + b"\0" * 18
    made["encrypted"] = fresh("encrypted")
    _set_flag(made["encrypted"])
    made["legacy"] = torch_zip(directory / "legacy.pt", _use_new_zipfile_serialization=False)
    made["not_torch"] = directory / "not_torch.pt"
    with zipfile.ZipFile(made["not_torch"], "w") as archive:
        archive.writestr("a.txt", "hello")
    whole = directory / "whole_module.pt"
    torch.save(torch.nn.Linear(2, 2), whole)
    made["whole_module"] = whole
    made["jit"] = directory / "jit.pt"
    with zipfile.ZipFile(made["jit"], "w") as archive:
        for name in ("a/data.pkl", "a/code/__torch__.py", "a/constants.pkl"):
            archive.writestr(name, pickle.dumps({}, 2))
    return made


def _flipped(data):
    """One byte of the weights changed, with the checksum as it was."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        at = next(info.header_offset for info in archive.infolist() if info.filename.endswith("data/0"))
    name, extra = struct.unpack_from("<HH", data, at + 26)
    at += 30 + name + extra
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def _set_flag(path):
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02") + 8
    data[at] |= 1
    path.write_bytes(bytes(data))


def sb3_zip(path, canary, *, evil_weights=False):
    """As Stable-Baselines3 writes: pickled code in JSON beside the weights."""
    inner = io.BytesIO()
    torch.save(weights(), inner)
    content = inner.getvalue()
    if evil_weights:
        part = path.with_suffix(".part")
        part.write_bytes(content)
        rewritten(part, lambda m: swapped(m, "data.pkl", pickles(canary)["reduce_protocol_2"]))
        content = part.read_bytes()
        part.unlink()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", '{"policy_class": {":serialized:": "gASV"}}')
        archive.writestr("policy.pth", content)
        archive.writestr("policy.optimizer.pth", b"anything")
        archive.writestr("pytorch_variables.pth", pickles(canary)["reduce_protocol_2"])
        archive.writestr("_stable_baselines3_version", "2.7.0")
    return path
