import skyfab as sky

WORDS = ["[PAD]", "[UNK]", "good", "fine", "bad", "poor", "film", "plot", "the", "a"]


@sky.function
def make_model(folder: str) -> None:
    """In place of a download: a small model with random weights, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "model_input_names": ["input_ids", "attention_mask"]}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    config = DistilBertConfig(vocab_size=len(WORDS), dim=16, n_heads=2, n_layers=1, hidden_dim=32)
    DistilBertForSequenceClassification(config).save_pretrained(folder)


@sky.function
def finetune(name: str, epochs: int) -> dict:
    import numpy as np
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(name)
    names = {0: "negative", 1: "positive"}
    model = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=2, id2label=names, label2id={text: number for number, text in names.items()}
    )
    rows = [(f"{word} {thing}", int(word in ("good", "fine"))) for word in WORDS[2:6] for thing in WORDS[6:8]] * 8
    data = Dataset.from_dict({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
    data = data.map(lambda batch: tokenizer(batch["text"], truncation=True), batched=True, remove_columns=["text"])
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="trained",
            num_train_epochs=epochs,
            learning_rate=1e-2,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": (np.argmax(found.predictions, axis=-1) == found.label_ids).mean()},
    )
    trained = trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model("trained")
    tokenizer.save_pretrained("trained")
    return {"node": sky.instance_info().node, "loss": trained.training_loss, "accuracy": float(accuracy)}


if __name__ == "__main__":
    image = sky.Image(pip=["transformers", "datasets", "accelerate", "torch"])
    with sky.Compute("node1", image=image) as compute:
        make_model("small") >> compute
        result = finetune("small", epochs=4) >> compute
        print(f"node {result['node']}: loss {result['loss']:.4f}, accuracy {result['accuracy']:.2f}")
