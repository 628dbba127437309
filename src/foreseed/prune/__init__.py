"""Foresight pruning: which weights of a model live, decided before training."""

from foreseed.prune.cost import Cost as Cost
from foreseed.prune.errors import MaskError as MaskError
from foreseed.prune.errors import PruneError as PruneError
from foreseed.prune.flow import synflow as synflow
from foreseed.prune.masks import Mask as Mask
from foreseed.prune.masks import apply_mask as apply_mask
from foreseed.prune.masks import check_mask as check_mask
from foreseed.prune.masks import dense_mask as dense_mask
from foreseed.prune.masks import densities as densities
from foreseed.prune.masks import keep_top as keep_top
from foreseed.prune.masks import load_mask as load_mask
from foreseed.prune.masks import prunable as prunable
from foreseed.prune.masks import rescale as rescale
from foreseed.prune.masks import save_mask as save_mask
from foreseed.prune.pruning import PRUNERS as PRUNERS
from foreseed.prune.pruning import PruneResult as PruneResult
from foreseed.prune.pruning import Step as Step
from foreseed.prune.pruning import foresight as foresight
from foreseed.prune.saliency import Saliency as Saliency
from foreseed.prune.saliency import Settings as Settings
from foreseed.prune.saliency import ntk_ori as ntk_ori
from foreseed.prune.saliency import ntk_rand as ntk_rand
from foreseed.prune.sensitivity import grasp as grasp
from foreseed.prune.sensitivity import snip as snip
