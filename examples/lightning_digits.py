"""Train with PyTorch Lightning and any strategy of slurmdl, one process per rank.

    mpirun -n 2 python examples/lightning_digits.py
    SLURMDL_TRAIN_STRATEGY=gossip torchrun --nproc-per-node=4 examples/lightning_digits.py
    slurmdl srun python examples/lightning_digits.py      (inside a job)

Lightning sees a single process; the callback lets slurmdl exchange gradients or models. Lightning's own distributed
strategies and checkpoints are not used: SLURMDL_TRAIN_CHECKPOINT_DIR=DIR resumes the training, its epochs and its
schedules.
"""

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from sklearn.datasets import load_digits

from slurmdl.train import init

run = init()


class Slurmdl(lightning.Callback):
    """Starts and ends the exchange with the other ranks."""

    def on_fit_start(self, trainer, module):
        run.wrap(module, trainer.optimizers[0])  # parameter servers serve in here and do not return
        run.register_for_checkpointing("fit_loop", trainer.fit_loop)
        for index, config in enumerate(trainer.lr_scheduler_configs):
            run.register_for_checkpointing(f"lr_scheduler_{index}", config.scheduler)

    def on_train_end(self, trainer, module):
        run.finish()  # all workers now hold the same model


class Classifier(lightning.LightningModule):
    """An ordinary module, without a word of slurmdl."""

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_index):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
training, test = slice(0, 1437), slice(1437, None)

torch.manual_seed(1)
model = Classifier()
trainer = lightning.Trainer(
    max_epochs=20, accelerator="cpu", devices=1, plugins=[LightningEnvironment()], callbacks=[Slurmdl()],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=run.is_main)
trainer.fit(model, run.loader((images[training], labels[training]), batch_size=32))
with torch.no_grad():
    accuracy = (model.network(images[test]).argmax(1) == labels[test]).float().mean().item()
run.print(f"accuracy {accuracy:.1%}")
