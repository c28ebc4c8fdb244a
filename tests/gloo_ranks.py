"""Two ranks that are threads of this process and meet over gloo, as processes do."""

import threading

from twinspark.distributed.group import make_group, make_store, open_store

HOST = "127.0.0.1"


def raised(error):
    return error


def on_two_ranks(work):
    """Results of `work(group, store)` on two ranks, which are threads here."""
    store, port = make_store(HOST)
    results, errors = [None, None], []

    def run(rank):
        try:
            own = store if rank == 0 else open_store((HOST, port))
            group = make_group(own, rank, 2, local_host=HOST, failed=raised)
            results[rank] = work(group, own)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    return results
