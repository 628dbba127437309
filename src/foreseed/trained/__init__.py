"""What to do with a trained model: export it, ask it, test it."""

from foreseed.trained.evaluating import Evaluation as Evaluation
from foreseed.trained.evaluating import evaluate as evaluate
from foreseed.trained.exporting import FORMATS as FORMATS
from foreseed.trained.exporting import export as export
from foreseed.trained.model import ExportError as ExportError
from foreseed.trained.model import Trained as Trained
from foreseed.trained.model import read_trained as read_trained
from foreseed.trained.predicting import Prediction as Prediction
from foreseed.trained.predicting import image_files as image_files
from foreseed.trained.predicting import predict as predict
from foreseed.trained.predicting import predict_files as predict_files
