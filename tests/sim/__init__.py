"""The whole service in virtual time: several replicas, a Kafka cluster and a provider in one process, one seed.

``python -m sim --seed 7`` runs one life; ``--runs 1000`` a thousand of them. Everything that may differ between two
lives follows from the seed: when records arrive, who is killed or paused and where, which replies are lost.
"""
