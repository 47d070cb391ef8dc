"""Parse the options of `nb.compress` and of `nb.replica(sync_every=...)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whale_nebula import codec as codecs
from whale_nebula.codec import Codec, Rank
from whale_nebula.codec.encoding import AUTO, NONFINITE, Encoding, derive_encodings
from whale_nebula.errors import OptionError
from whale_nebula.ir.outer_optimizer import OUTER_BY_NAME, Average, Outer
from whale_nebula.ir.program import ASYNC, SYNC, UNDECIDED, LocalSgd
from whale_nebula.schedule.rounds import MAX_INTERVAL, choose_delay
from whale_nebula.scopes import options as values
from whale_nebula.scopes.frames import Frame, cluster_block_of, compress_of, replica_of
from whale_nebula.site import calling_site

FLAGS = ("svd", "rank", "topk", "fp16", "bf16", "int8", "int4", "basis")
"""The options of `nb.compress` that define one codec."""
_KEYWORDS = {"codec": ("auto",), "backward": ("default", "none"), "forward": ("none",), "compress": ("auto", "none")}
"""The words that an option accepts instead of a codec."""
_OTHER_OPTIONS = ("ramp", "delta", "mask", "forward", "zstd")


def check_compress_options(arguments: Mapping[str, Any]) -> dict[str, object]:
    """Validate the given arguments of `nb.compress` and return a frame's options: flags become a codec."""
    try:
        codec = _choose_codec(arguments["codec"], codecs.from_flags(**{name: arguments[name] for name in FLAGS}))
        options = {
            "codec": codec,
            "backward": _check_backward(arguments["backward"]),
            "start_step": _check_non_negative("start_step", arguments["start_step"]),
            "ramp": _check_ramp(arguments["ramp"]),
            "delta": None if arguments["delta"] is None else values.check_name("delta", arguments["delta"]),
            "mask": _check_mask(arguments["mask"]),
            "forward": arguments["forward"]
            if arguments["forward"] in (None, "none")
            else _check_codec("forward", arguments["forward"]),
            "zstd": values.check_bool("zstd", arguments["zstd"]),
            "nonfinite": values.check_choice("nonfinite", arguments["nonfinite"], NONFINITE),
        }
        derive_encodings(options)
    except OptionError as error:  # also raised by codecs, without the user's line
        raise OptionError(error.what, where=str(calling_site()), why=error.why, mend=error.mend) from None
    if codec is None and not any(options[name] for name in _OTHER_OPTIONS):
        back = "" if arguments["backward"] == "default" else f"backward={arguments['backward']!r}"
        mend = f"nb.compress(fp16=True{', ' * bool(back)}{back})"
        raise values.option_error(f"nb.compress({back}) specifies no codec", mend=mend)
    return options


def _check_backward(value: Any) -> Any:
    """Validate `backward`: None, "default", a precision's name, or a codec that replaces the whole backward codec."""
    if value is not None and value not in ("default", "none") and not isinstance(value, Codec):
        _check_codec("backward", value)
    return value


def _check_ramp(value: Any) -> Any:
    """Validate `ramp`: True, the bound of the next precision's error, or the precisions that are used first."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        if 0 < value < 1:
            return float(value)
        raise OptionError(
            f"ramp={value!r} is not a valid bound", why="it is an upper bound of a relative error", mend="ramp=0.05"
        )
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        found = [codecs.parse(name) for name in value]
        for name, codec in zip(value, found, strict=True):
            if not isinstance(codec, codecs.Precision):
                raise OptionError(f"ramp= lists precisions, and {name!r} is not one", mend='ramp=["fp16", "int8"]')
        return tuple(map(str, found))
    raise OptionError(f"ramp={value!r} is not a valid ramp", mend='ramp=True, or ramp=["fp16", "int8"]')


def _check_mask(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return values.check_name("mask", value)
    why = "mask= names the input that marks the rows to send, or is True for Keras's own mask"
    raise OptionError(f"mask={type(value).__name__} is neither True nor a name", why=why, mend="mask=True")


def _choose_codec(codec: Any, flag_codec: Codec | None) -> Codec | str | None:
    if codec is None:
        return flag_codec
    if flag_codec is not None:
        why = "flags define a codec, and a boundary has only one"
        mend = f"nb.compress({codec!r}) or nb.compress({str(flag_codec)!r})"
        raise values.option_error(
            f"nb.compress({codec!r}) also has flags, which define {str(flag_codec)!r}", why=why, mend=mend
        )
    return "auto" if codec == "auto" else _check_codec("codec", codec)


def parse_crossing_codec(value: Any) -> str | None:
    """Validate `compress` of `nb.auto_parallel` and return it as text: a codec, "auto", or None for no codec."""
    if value is None or value == "none":
        return None
    try:
        return "auto" if value == "auto" else str(_check_codec("compress", value))
    except OptionError as error:
        raise OptionError(error.what, where=str(calling_site()), why=error.why, mend=error.mend) from None


def _check_codec(option: str, value: Any) -> Codec:
    try:
        codec = codecs.parse(value, _KEYWORDS[option]) if isinstance(value, str) else value
    except OptionError as error:  # a text's error names the option that was written
        raise OptionError(f"{option}={value!r}: {error.what}", why=error.why, mend=error.mend) from None
    if not isinstance(codec, Codec):
        raise values.option_error(f"{option}={value!r} is not a codec", mend=f"{option}=nb.codec.FP16()")
    if codec.lossless:
        why = "integers are always packed into as few bits as they need"
        raise values.option_error(f"{option}={value!r} cannot be chosen", why=why, mend=f"remove {option}=")
    if not codecs.is_built(codec):
        why = f"other processes find codecs by name, and {str(codec)!r} is not registered"
        raise values.option_error(
            f"{option}={value!r} is not registered", why=why, mend="decorate its class with @nb.codec.register"
        )
    return codec


def find_learned_rank(frame: Frame) -> Rank | None:
    """The trained basis that a compress scope requests ("learned" or "svd"); None if it requests none.

    >>> import whale_nebula as nb
    >>> with nb.cluster(), nb.compress(rank=4) as frame:
    ...     find_learned_rank(frame)
    """
    codec = frame.options.get("codec")
    members = codec.members if isinstance(codec, Codec) else ()
    return next((part for part in members if isinstance(part, Rank) and part.trained), None)


ONE_BIT = "1bit"
_LOCAL_SGD_DEFAULTS = {"outer": "average", "mode": SYNC, "fragments": None, "delay": None, "staleness": None}
"""The defaults of the options that require `sync_every`."""
_DIFFERENCE_CODECS = ("TopK", "FP16", "BF16", "INT8", "INT4")


def check_local_sgd_options(arguments: Mapping[str, Any]) -> dict[str, object]:
    """Validate the local SGD options of `nb.replica` and return a frame's options; none without `sync_every`."""
    if arguments["exchange"] is not None:
        return _check_exchange(arguments)
    if arguments["sync_every"] is None:
        idle = [
            name
            for name in ("mode", "fragments", "delay", "staleness", "outer")
            if arguments[name] != _LOCAL_SGD_DEFAULTS[name]
        ]
        if idle:
            option = f"{idle[0]}={arguments[idle[0]]!r}"
            raise values.option_error(
                f"{option} has no effect without sync_every",
                why="replicas of one cluster are identical after every step",
                mend=f"nb.replica(sync_every=100, {option})",
            )
        return {}
    every = (
        arguments["sync_every"]
        if arguments["sync_every"] == AUTO
        else values.check_count("sync_every", arguments["sync_every"])
    )
    mode = values.check_choice("mode", arguments["mode"], (SYNC, ASYNC))
    fragments, delay, staleness = arguments["fragments"], arguments["delay"], arguments["staleness"]
    if mode == ASYNC and (fragments, delay) != (None, None):
        name = "fragments" if fragments is not None else "delay"
        why = "a server receives each difference as a whole, as soon as it arrives"
        raise values.option_error(f"{name}= cannot be combined with mode='async'", why=why, mend=f"remove {name}=")
    if mode == SYNC and staleness is not None:
        why = "in mode='sync' all clusters wait for each other"
        raise values.option_error(
            f"staleness={staleness!r} has no effect without mode='async'", why=why, mend='mode="async"'
        )
    most = MAX_INTERVAL if every == AUTO else every
    return {
        "sync_every": every,
        "outer": _check_outer(arguments["outer"], mode),
        "mode": mode,
        "fragments": None
        if fragments is None
        else _check_maximum("fragments", values.check_count("fragments", fragments), most),
        "delay": None if delay is None else _check_maximum("delay", _check_non_negative("delay", delay), most - 1),
        "staleness": None if staleness is None else _check_non_negative("staleness", staleness),
    }


def _check_exchange(arguments: Mapping[str, Any]) -> dict[str, object]:
    """Validate `exchange="1bit"`: momenta are exchanged after each step, so it excludes the other options."""
    values.check_choice("exchange", arguments["exchange"], (ONE_BIT,))
    others = {
        name: arguments[name]
        for name in ("sync_every", *_LOCAL_SGD_DEFAULTS, "shard")
        if arguments[name] != _LOCAL_SGD_DEFAULTS.get(name)
    }
    for name, value in others.items():
        raise values.option_error(
            f"{name}={value!r} cannot be combined with exchange={ONE_BIT!r}",
            why="the copies exchange momenta after each step, and are identical then",
            mend=f"remove {name}=",
        )
    return {**_LOCAL_SGD_DEFAULTS, "sync_every": 1, "exchange": ONE_BIT}


def _check_non_negative(option: str, value: Any) -> int:
    number = values.check_integer(option, value)
    if number < 0:
        raise values.option_error(f"{option}={value!r} is negative", mend=f"{option}=0")
    return number


def _check_maximum(option: str, value: int, most: int) -> int:
    if value > most:
        why = "a fragment is sent once every sync_every steps, and must arrive before it is sent again"
        raise values.option_error(f"{option}={value} is greater than {most}", why=why, mend=f"{option}={most}")
    return value


def _check_outer(value: Any, mode: str) -> Outer | str:
    """Validate `outer`: a known name, or an object of `nb.outer`."""
    if isinstance(value, str):
        values.check_choice("outer", value, OUTER_BY_NAME)
    elif not isinstance(value, Outer):
        raise values.option_error(
            f"outer={value!r} is not an outer optimizer", mend='outer="nesterov", or nb.outer.Nesterov()'
        )
    if mode == ASYNC and value not in ("average", Average()):
        why = "a server adds each cluster's difference when it arrives, and never has their mean"
        raise values.option_error(
            f"outer={value!r} cannot be combined with mode='async'", why=why, mend='outer="average"'
        )
    return value


def find_local_sgd_options(frames: Sequence[Frame], frame: Frame | None = None) -> LocalSgd | None:
    """The local SGD options in effect inside these scopes; None without local SGD. `frame` is the replica scope, by
    default the innermost. Raises for a codec that cannot encode differences.
    """
    frame = frame or replica_of(frames)
    if frame is None or frame.options.get("sync_every") is None:
        return None
    options, block, compress = frame.options, cluster_block_of(frames), compress_of(frames)
    layout = block.options["layout"] if block is not None else "all"
    every, delay, outer = options["sync_every"], options["delay"], options["outer"]
    every = UNDECIDED if every == AUTO else every
    shared: dict[str, Any] = {
        "every": every,
        "codec": str(_difference_encoding(compress)) if compress is not None else "none",
        "clusters": layout if isinstance(layout, tuple) else (),
        "mode": options["mode"],
        "where": str(frame.site),
    }
    if options.get("exchange") is not None:
        if compress is not None:
            what = f"nb.compress ({_difference_encoding(compress)}) around momenta that cross as one bit per number"
            raise OptionError(
                what, where=shared["where"], why='exchange="1bit" is a codec itself', mend="remove nb.compress"
            )
        return LocalSgd(fragments=1, exchange=ONE_BIT, **shared)
    if options["mode"] == ASYNC:  # a server adds each difference as it arrives, which averages
        staleness = 1 if options["staleness"] is None else int(options["staleness"])
        return LocalSgd(fragments=1, delay=0, outer=Average(), staleness=staleness, **shared)
    return LocalSgd(
        fragments=options["fragments"] or 0,
        delay=delay if delay is not None else UNDECIDED if every == UNDECIDED else choose_delay(every),
        outer=OUTER_BY_NAME[outer] if isinstance(outer, str) else outer,
        staleness=0,
        **shared,
    )


def _difference_encoding(frame: Frame) -> Encoding:
    """The encoding of weight differences under an `nb.compress`; raises if its codec needs samples."""
    encoding = derive_encodings(frame.options)[0]
    parts = () if encoding.codec is None else encoding.codec.members
    unfit = [name for part in parts if (name := type(part).__name__) not in _DIFFERENCE_CODECS]
    options = {
        "auto": encoding.auto,
        "ramp": encoding.ladder,
        "delta": encoding.delta,
        "mask": encoding.mask is not None,
    }
    unfit += [name for name, value in options.items() if value]
    if unfit:
        what = f"weight differences cannot be encoded by {unfit[0]}"
        why = "a weight difference has no sample axis; use fp16, bf16, integers or topk"
        mend = "nb.compress(int4=True), or nb.compress(topk=0.05, int8=True)"
        raise OptionError(what, where=str(frame.site), why=why, mend=mend)
    return encoding
