//! [`Encoder`]: texts to vectors and scores, with the tokenizer around a [`TextEncoder`].

use crate::BackendDispatch;
use crate::dispatch::{DeviceJob, KvElement};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_kernels::{BackendKvDtype, KvF32, LlmBackend};
use ferrum_models::encoder::{
    EncoderLimits, EncoderModel, EncoderRunner, TextEncoder, TextInput, load_encoder,
};
use ferrum_models::{LoadProgress, Pooling, WeightForm};
use ferrum_types::{Error, Result, TokenId};

/// Tokens of the shortest pair: four special ones, and one of a text.
const LEAST_TOKENS: usize = 5;

/// An encoder on a device, and what makes tokens of texts for it.
pub struct Encoder {
    inner: Box<dyn TextEncoder>,
    tokenizer: Tokenizer,
    pooling: Option<Pooling>,
    max_tokens: usize,
    /// The special tokens at the beginning of a text, and behind each text of a pair.
    cls: TokenId,
    sep: TokenId,
}

/// What a text became.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedded {
    /// Its vector.
    pub vector: Vec<f32>,
    /// Tokens that were computed, those that were added included.
    pub tokens: usize,
    /// Whether its end was cut off because it is too long for the model.
    pub cut: bool,
}

impl Embedded {
    /// Keeps the first `dimensions` numbers of the vector, at length 1 if `normalize`: for models that were trained so
    /// that the first numbers say most (Kusupati et al., "Matryoshka Representation Learning", 2022).
    pub fn shorten(&mut self, dimensions: usize, normalize: bool) {
        self.vector.truncate(dimensions);
        if normalize {
            unit_length(&mut self.vector);
        }
    }
}

/// Tokens of a text or a pair.
struct Input {
    tokens: Vec<TokenId>,
    second: usize,
    cut: bool,
}

impl Input {
    fn as_text(&self) -> TextInput<'_> {
        TextInput {
            tokens: &self.tokens,
            second: self.second,
        }
    }
}

impl Encoder {
    /// Loads an encoder onto a device.
    ///
    /// # Errors
    /// Those of [`load_encoder`]; `Model` for a tokenizer without the special tokens that an encoder wants around texts,
    /// and a model that has no room for them.
    pub fn load(
        device: &BackendDispatch,
        model: &EncoderModel,
        tokenizer: Tokenizer,
        progress: LoadProgress<'_>,
    ) -> Result<Self> {
        let special = tokenizer.special();
        let found = (special.cls.or(special.bos), special.sep.or(special.eos));
        let (Some(cls), Some(sep)) = found else {
            return Err(Error::Model(
                "tokenizer_config.json: found no cls_token and sep_token, which an encoder has around texts"
                    .into(),
            ));
        };
        let most = model.spec.max_tokens();
        if most < LEAST_TOKENS {
            return Err(Error::Model(format!(
                "config.json: max_position_embeddings and pad_token_id leave room for {most} tokens, expected \
                 {LEAST_TOKENS} at least: up to four special tokens, and one of a text"
            )));
        }
        let load = Load { model, progress };
        let inner = match device {
            BackendDispatch::Cpu(device) => KvF32::on_cpu(device, keeps_blocks(model), load),
            BackendDispatch::Gpu(device) => KvF32::on_gpu(device, load),
            BackendDispatch::Reference(device) => KvF32::on_reference(device, load),
        }?;
        let cut_off = |len: usize| len.clamp(LEAST_TOKENS, most);
        Ok(Self {
            inner,
            tokenizer,
            pooling: model.pooling,
            max_tokens: model.max_seq_length.map_or(most, cut_off),
            cls,
            sep,
        })
    }

    /// How the model's files say that vectors are pooled; `None` for ways that are not known.
    pub fn pooling(&self) -> Option<Pooling> {
        self.pooling
    }

    /// Elements of a vector.
    pub fn dimensions(&self) -> usize {
        self.inner.spec().hidden_size
    }

    /// Logits of a pair; 0 for a model that cannot score.
    pub fn labels(&self) -> usize {
        self.inner.spec().labels
    }

    /// Tokens of the longest text, special ones included; longer ones are cut off.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    /// The vectors of texts, of length 1 if `normalize`.
    ///
    /// # Errors
    /// Those of the tokenizer and of [`TextEncoder::embed`].
    pub fn embed(
        &mut self,
        texts: &[impl AsRef<str>],
        pooling: Pooling,
        normalize: bool,
    ) -> Result<Vec<Embedded>> {
        let inputs = texts.iter().map(|text| self.text(text.as_ref()));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let views: Vec<_> = inputs.iter().map(Input::as_text).collect();
        let vectors = self.inner.embed(&views, pooling)?;
        let embedded = vectors.into_iter().zip(inputs).map(|(mut vector, input)| {
            if normalize {
                unit_length(&mut vector);
            }
            Embedded {
                vector,
                tokens: input.tokens.len(),
                cut: input.cut,
            }
        });
        Ok(embedded.collect())
    }

    /// How well each document answers the query, from 0 to 1, and how many of the pairs were cut off.
    ///
    /// # Errors
    /// `InvalidArgument` for a model that does not give one score; those of the tokenizer and of
    /// [`TextEncoder::classify`].
    pub fn rerank(
        &mut self,
        query: &str,
        documents: &[impl AsRef<str>],
    ) -> Result<(Vec<f32>, usize)> {
        let labels = self.labels();
        if labels != 1 {
            let reason = format!("the model gives {labels} scores to a pair, a reranker gives one");
            return Err(Error::invalid("rerank", reason));
        }
        let query = self.tokens(query)?;
        let inputs = documents.iter().map(|document| {
            let document = self.tokens(document.as_ref())?;
            Ok(self.pair(&query, document))
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let views: Vec<_> = inputs.iter().map(Input::as_text).collect();
        let logits = self.inner.classify(&views)?;
        let sigmoid = |x: f32| (1.0 / (1.0 + f64::from(-x).exp())) as f32;
        let scores = logits.iter().flatten().map(|&logit| sigmoid(logit));
        let cut = inputs.iter().filter(|input| input.cut).count();
        Ok((scores.collect(), cut))
    }

    fn tokens(&self, text: &str) -> Result<Vec<TokenId>> {
        let options = EncodeOptions {
            add_special: false,
            parse_special: false,
        };
        let tokens = self.tokenizer.encode(text, options);
        tokens.map_err(|e| Error::invalid("encode", e.to_string()))
    }

    fn text(&self, text: &str) -> Result<Input> {
        let mut tokens = self.tokens(text)?;
        let room = self.max_tokens - 2;
        let cut = tokens.len() > room;
        tokens.truncate(room);
        tokens.insert(0, self.cls);
        tokens.push(self.sep);
        let second = tokens.len();
        Ok(Input {
            tokens,
            second,
            cut,
        })
    }

    /// `[CLS] query [SEP] document [SEP]`, with two separators between them where the model has no segments (RoBERTa). Of what
    /// is too long, the longer one loses tokens, as in `transformers`.
    fn pair(&self, query: &[TokenId], document: Vec<TokenId>) -> Input {
        let between = match self.inner.spec().family {
            "roberta" => 2,
            _ => 1,
        };
        let room = self.max_tokens - 2 - between;
        let (mut first, mut second) = (query.len(), document.len());
        let cut = first + second > room;
        while first + second > room {
            match first > second {
                true => first -= 1,
                false => second -= 1,
            }
        }
        let mut tokens = Vec::with_capacity(first + second + 2 + between);
        tokens.push(self.cls);
        tokens.extend(&query[..first]);
        tokens.resize(tokens.len() + between, self.sep);
        let begins = tokens.len();
        tokens.extend(&document[..second]);
        tokens.push(self.sep);
        Input {
            tokens,
            second: begins,
            cut,
        }
    }
}

/// Whether quantised weights are worth keeping, as for [decoders](ferrum_models::Model::keeps_blocks).
fn keeps_blocks(model: &EncoderModel) -> bool {
    let spec = &model.spec;
    let layer = 4 * spec.hidden_size + 2 * spec.intermediate;
    let parameters = spec.hidden_size * (spec.vocab_size + spec.layers * layer);
    4 * parameters > 64 << 20
}

fn unit_length(vector: &mut [f32]) {
    let squares = vector.iter().map(|x| f64::from(*x) * f64::from(*x));
    let length = squares.sum::<f64>().sqrt();
    if length > 0.0 {
        for x in vector {
            *x = (f64::from(*x) / length) as f32;
        }
    }
}

/// Loads an encoder on whichever device.
struct Load<'a, 'p> {
    model: &'a EncoderModel,
    progress: LoadProgress<'p>,
}

impl DeviceJob<KvF32> for Load<'_, '_> {
    type Output = Box<dyn TextEncoder>;

    fn run<B: LlmBackend + BackendKvDtype<KvF32>, W: WeightForm<B>>(
        self,
        (loading, running): (&B, &B),
    ) -> Result<Self::Output> {
        let Self { model, progress } = self;
        let weights = load_encoder::<B, W>(loading, model, progress)?;
        let limits = EncoderLimits::of(&model.spec);
        let runner = EncoderRunner::new(running, model.spec.clone(), weights, limits)?;
        Ok(Box::new(runner))
    }
}
