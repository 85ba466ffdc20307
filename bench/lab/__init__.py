"""A small network on one machine, for measurements on links of a chosen rate; `bench/netlab` is its command line.

    with stoppable(), Lab([parse_rate("100mbit")] * 4) as lab:
        ranks = Ranks(lab, ["python", "train.py"])
        ranks.wait(timeout=600)
        lab.set_rates([1e9] * 4)

`network` has the namespaces and links, `ranks` the processes inside, `mpi` the start by mpirun.
"""
