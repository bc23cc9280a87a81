"""Variables and folders are set before the imports that depend on them."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "2"
os.environ["SKLEARN_ASSUME_FINITE"] = "1"
sys.path.insert(0, sys.argv[1])

import joblib
import sklearn
import torch
from torch.utils.data import TensorDataset

import elastic

run = elastic.start(seed=3, global_batch=8, shards=4)
assumes = sklearn.get_config()["assume_finite"]
run.print(
    f"assume_finite {assumes}, joblib {getattr(joblib, 'WHERE', 'installed')}, threads {torch.get_num_threads()}"
)
model = torch.nn.Linear(4, 4)
for step in run.steps(run.data(TensorDataset(torch.randn(16, 4)), epochs=1), elastic.State(model=model)):
    step.mean_loss(lambda batch: (model(batch.data[0]) - batch.data[0]).pow(2).mean())
    model.zero_grad()  # nothing is learned
