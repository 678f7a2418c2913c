"""Trains a few numbers with the small framework in this folder, which has the shape of ModelLink af1347."""

from __future__ import annotations

from ascendspeed.training import pretrain

if __name__ == "__main__":
    pretrain()
