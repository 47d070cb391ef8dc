"""TensorFlow's collectives: how a process becomes a task, and the effect of a late start."""

import textwrap

import pytest

from tests.processes import zygote

START = """
import socket
import tensorflow as tf
from whale_nebula.tf import collectives as own

def address():
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{trial.getsockname()[1]}"

def total(tensor):
    return tf.function(lambda x: tf.raw_ops.CollectiveReduceV2(
        input=x, group_size=1, group_key=1, instance_key=2, ordering_token=[], merge_op="Add", final_op="Id"))(tensor)

here, elsewhere = address(), "127.0.0.1:1"
"""


def run_fresh(script: str) -> list[str]:
    """What a script says in a process that has computed nothing yet."""
    text = START + textwrap.dedent(script)
    done = zygote.run("-c", text)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def prepared_output() -> list[str]:
    return run_fresh("""
        own.prepare_task(1, [elsewhere, here], lambda: print("started"))
        print(own.find_task())
        tf.config.threading.set_inter_op_parallelism_threads(2)
        variable, rows = tf.Variable([1.0]), iter(tf.data.Dataset.range(3))
        print(own.find_task() == own.Task(1, 2, here), variable.device)
        own.start_server(1, [address(), here])
        threads = tf.config.threading.get_inter_op_parallelism_threads()
        print(variable.assign_add([1.0]).numpy(), int(next(rows)), threads)
    """)


def test_prepare_task_waits_for_the_runtime_and_sets_device_names(prepared_output: list[str]) -> None:
    assert prepared_output[:3] == ["None", "started", "True /job:worker/replica:0/task:1/device:CPU:0"]


def test_start_server_again_keeps_variables_and_iterators(prepared_output: list[str]) -> None:
    assert prepared_output[3] == "[2.] 0 2"


def test_start_server_then_find_task_and_abort_collectives() -> None:
    output = run_fresh("""
        own.start_server(0, [here])
        print(own.find_task() == own.Task(0, 1, here), total(tf.constant([3.0])).numpy())
        own.abort_collectives("enough of it")
        try:
            total(tf.constant([3.0, 4.0]))
        except tf.errors.UnavailableError as error:
            print("enough of it" in error.message)
    """)
    assert output == ["True [3.]", "True"]


def test_start_server_too_late_invalidates_variables() -> None:
    """Why it is refused. Were it to work, nothing would have to be prepared."""
    output = run_fresh("""
        variable = tf.Variable(1.0)
        own.start_server(1, [elsewhere, here])
        try:
            variable.numpy()
        except tf.errors.InvalidArgumentError as error:
            print("unknown device" in error.message)
    """)
    assert output == ["True"]


MEMBERS = """
import threading
own.find_device.cache_clear()
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
found = [None, None]

def member(number, call):
    with tf.device(f"/CPU:{number}"):
        found[number] = tf.nest.map_structure(lambda each: each.numpy().tolist(), tf.function(call)(number))

def together(*calls):
    threads = [threading.Thread(target=member, args=each) for each in enumerate(calls)]
    [each.start() for each in threads], [each.join(60) for each in threads]
    return found
"""


def test_reduce_and_gather_and_exchange_by_hash_key() -> None:
    """Each key belongs to a shape: where it has the number of entries in it, one op takes tensors of several."""
    output = run_fresh(
        MEMBERS
        + textwrap.dedent("""
        def both(n):
            x = tf.fill([2], 1.0 + n)
            keys = (own.hash_key("group"), tf.size(x))
            summed, most = own.reduce(x, 2, 1, keys[1], "Add"), own.reduce(x, 2, 2, 7, "Max")
            return summed, most, own.gather(x, 2, *keys)
        print(together(both, both))
        swapped = lambda n: own.exchange(tf.constant([[10 * n], [10 * n + 1]]), 2, 4, 8)
        print(together(swapped, swapped))
        """)
    )
    assert output[0] == str([([3.0, 3.0], [2.0, 2.0], [1.0, 1.0, 2.0, 2.0])] * 2)
    assert output[1] == "[[[0], [10]], [[1], [11]]]"


def test_send_and_receive_accept_a_shape_tensor_on_find_device() -> None:
    output = run_fresh(
        MEMBERS
        + textwrap.dedent("""
        send = lambda n: own.send(tf.constant([[1.0, 2.0]]), 2, 5, 9)
        receive = lambda n: own.receive(tf.constant([1, 2]), tf.float32, 2, 5, 9)
        print(together(send, receive), own.find_device())
        """)
    )
    assert output == ["[[[1.0, 2.0]], [[1.0, 2.0]]] /CPU:0"]
