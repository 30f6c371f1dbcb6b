//! [`Encoder`]: texts to vectors and scores, with the tokenizer around a [`TextEncoder`].
//!
//! [`EncoderTokenizer`] makes tokens of texts on any thread; the [`Encoder`] computes them, alone or on the thread of a
//! [`TaskEngine`](crate::TaskEngine).

use crate::device::DeviceJob;
use crate::{BackendDispatch, TaskModel};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_kernels::{BackendKvDtype, KvF32, LlmBackend};
use ferrum_models::encoder::{
    EncoderLimits, EncoderModel, EncoderRunner, TextEncoder, TextInput, load_encoder,
};
use ferrum_models::{DenseLayers, EmbeddingPrompts, LoadProgress, Pooling, WeightForm};
use ferrum_types::{Error, Result, TokenId};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Tokens of the shortest pair: four special ones, and one of a text.
const MIN_TOKENS: usize = 5;

/// Tokens of tasks that are computed together: more would keep the first one waiting for no gain.
const TOKENS_TOGETHER: usize = 4096;

/// What makes tokens of texts for an encoder.
#[derive(Debug)]
pub struct EncoderTokenizer {
    tokenizer: Tokenizer,
    max_tokens: usize,
    vocab_size: usize,
    /// The special tokens at the beginning of a text, and after each text of a pair.
    cls: TokenId,
    sep: TokenId,
    /// Separators between the texts of a pair.
    between: usize,
}

/// Tokens of a text or of a pair.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderInput {
    tokens: Vec<TokenId>,
    /// Where the second text of a pair begins.
    second: usize,
    /// Tokens that there would be if nothing had been cut off.
    full: usize,
}

impl EncoderInput {
    /// Its tokens, those that were added included.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Tokens that it would have if nothing had been cut off.
    pub fn full_len(&self) -> usize {
        self.full
    }

    /// Whether something was cut off.
    pub fn is_cut(&self) -> bool {
        self.full > self.tokens.len()
    }

    fn as_text(&self) -> TextInput<'_> {
        TextInput {
            tokens: &self.tokens,
            second: self.second,
        }
    }
}

impl EncoderTokenizer {
    /// Holds a tokenizer against the model that it is for.
    fn new(model: &EncoderModel, tokenizer: Tokenizer) -> Result<Self> {
        let special = tokenizer.special();
        let found = (special.cls.or(special.bos), special.sep.or(special.eos));
        let (Some(cls), Some(sep)) = found else {
            return Err(Error::Model(
                "tokenizer_config.json: found no cls_token and sep_token, which an encoder has around texts"
                    .into(),
            ));
        };
        let most = model.spec.max_tokens();
        if most < MIN_TOKENS {
            return Err(Error::Model(format!(
                "config.json: max_position_embeddings and pad_token_id leave room for {most} tokens, expected \
                 {MIN_TOKENS} at least: up to four special tokens, and one of a text"
            )));
        }
        let cut_off = |len: usize| len.clamp(MIN_TOKENS, most);
        Ok(Self {
            tokenizer,
            max_tokens: model.max_seq_length.map_or(most, cut_off),
            vocab_size: model.spec.vocab_size,
            cls,
            sep,
            between: match model.spec.family {
                "roberta" => 2,
                // Those of many languages have the vocabulary of XLM-RoBERTa, in which a text ends as a sequence does.
                "gte" if special.sep.is_some() && special.sep == special.eos => 2,
                _ => 1,
            },
        })
    }

    /// Tokens of the longest text, special ones included.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Size of the model's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// A text with the special tokens around it, of at most `most` tokens in all: its end is cut off.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn text(&self, text: &str, most: usize) -> Result<EncoderInput> {
        let mut tokens = self.tokens(text)?;
        let full = tokens.len() + 2;
        tokens.truncate(most.min(self.max_tokens).saturating_sub(2));
        tokens.insert(0, self.cls);
        tokens.push(self.sep);
        Ok(EncoderInput {
            second: tokens.len(),
            tokens,
            full,
        })
    }

    /// An input of tokens that the caller provides; at most the first `most`.
    ///
    /// # Errors
    /// `InvalidArgument` without a token, and for one that is not in the vocabulary.
    pub fn given(&self, mut tokens: Vec<TokenId>, most: usize) -> Result<EncoderInput> {
        if tokens.is_empty() {
            return Err(Error::invalid("encode", "found no token"));
        }
        let size = self.vocab_size;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= size) {
            let reason = format!("found token {token}, expected 0 to {}", size - 1);
            return Err(Error::invalid("encode", reason));
        }
        let full = tokens.len();
        tokens.truncate(most.min(self.max_tokens));
        Ok(EncoderInput {
            second: tokens.len(),
            tokens,
            full,
        })
    }

    /// `[CLS] query [SEP] document [SEP]`, with two separators between them where the model has no segments (RoBERTa), of
    /// at most `most` tokens. Of what is too long, the longer one loses tokens, as in `transformers`.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn pair(&self, query: &str, document: &str, most: usize) -> Result<EncoderInput> {
        Ok(self.joined(&self.tokens(query)?, &self.tokens(document)?, most))
    }

    /// [`pair`](Self::pair) of one query with each document.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn pairs(
        &self,
        query: &str,
        documents: &[impl AsRef<str>],
        most: usize,
    ) -> Result<Vec<EncoderInput>> {
        let query = self.tokens(query)?;
        let documents = documents.iter();
        documents
            .map(|document| Ok(self.joined(&query, &self.tokens(document.as_ref())?, most)))
            .collect()
    }

    fn joined(&self, query: &[TokenId], document: &[TokenId], most: usize) -> EncoderInput {
        let special = 2 + self.between;
        let room = most.min(self.max_tokens).saturating_sub(special);
        let (mut first, mut second) = (query.len(), document.len());
        let full = first + second + special;
        while first + second > room {
            match first > second {
                true => first -= 1,
                false => second -= 1,
            }
        }
        let mut tokens = Vec::with_capacity(first + second + special);
        tokens.push(self.cls);
        tokens.extend(&query[..first]);
        tokens.resize(tokens.len() + self.between, self.sep);
        let begins = tokens.len();
        tokens.extend(&document[..second]);
        tokens.push(self.sep);
        EncoderInput {
            tokens,
            second: begins,
            full,
        }
    }

    /// The text of an input, special tokens included, for a log.
    pub fn decode(&self, input: &EncoderInput) -> String {
        self.tokenizer.decode(&input.tokens, false)
    }

    fn tokens(&self, text: &str) -> Result<Vec<TokenId>> {
        let options = EncodeOptions {
            add_special: false,
            parse_special: false,
        };
        let tokens = self.tokenizer.encode(text, options);
        tokens.map_err(|e| Error::invalid("encode", e.to_string()))
    }
}

/// An encoder on a device, with what makes tokens of texts for it.
pub struct Encoder {
    inner: Box<dyn TextEncoder>,
    tokenizer: Arc<EncoderTokenizer>,
    pooling: Option<Pooling>,
    /// What makes embeddings of pooled vectors.
    dense: DenseLayers,
    prompts: EmbeddingPrompts,
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

/// Which outputs an encoder computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderWant {
    /// An embedding of each, not normalised.
    Vectors(Pooling),
    /// The logits of each.
    Logits,
}

/// Texts that are computed together.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderTask {
    /// The texts.
    pub inputs: Vec<EncoderInput>,
    /// Which outputs to compute.
    pub want: EncoderWant,
}

/// Vectors or logits, one of each input of an [`EncoderTask`].
pub type EncoderAnswer = Vec<Vec<f32>>;

impl TaskModel for Encoder {
    type Task = EncoderTask;
    type Output = EncoderAnswer;

    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    fn tokens(task: &EncoderTask) -> usize {
        task.inputs.iter().map(|input| input.tokens.len()).sum()
    }

    fn joins(&self, first: &EncoderTask, next: &EncoderTask, tokens: usize) -> bool {
        first.want == next.want && tokens + Self::tokens(next) <= TOKENS_TOGETHER
    }

    fn run(
        &mut self,
        tasks: &[EncoderTask],
        _step: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<EncoderAnswer>> {
        let Some(first) = tasks.first() else {
            return Ok(Vec::new());
        };
        let inputs = tasks.iter().flat_map(|task| &task.inputs);
        let texts: Vec<_> = inputs.map(EncoderInput::as_text).collect();
        let found = match first.want {
            EncoderWant::Vectors(pooling) => self.vectors(&texts, pooling)?,
            EncoderWant::Logits => self.inner.classify(&texts)?,
        };
        let mut found = found.into_iter();
        let answers = tasks.iter();
        Ok(answers
            .map(|task| found.by_ref().take(task.inputs.len()).collect())
            .collect())
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
        let tokenizer = Arc::new(EncoderTokenizer::new(model, tokenizer)?);
        let load = Load { model, progress };
        let device = device.for_encoders();
        let inner = device.with_kv::<KvF32, _>(keeps_blocks(model), load)?;
        Ok(Self {
            inner,
            tokenizer,
            pooling: model.pooling,
            dense: model.dense.clone(),
            prompts: model.prompts.clone(),
        })
    }

    /// What makes tokens of texts for it.
    pub fn tokenizer(&self) -> &Arc<EncoderTokenizer> {
        &self.tokenizer
    }

    /// How the model's files say that vectors are pooled; `None` for ways that are not known.
    pub fn pooling(&self) -> Option<Pooling> {
        self.pooling
    }

    /// What it may be given before texts that become vectors, which is for the caller to do.
    pub fn prompts(&self) -> &EmbeddingPrompts {
        &self.prompts
    }

    /// Elements of a vector.
    pub fn dimensions(&self) -> usize {
        self.dense.dimensions(self.inner.spec().hidden_size)
    }

    /// Logits of a pair; 0 for a model that cannot score.
    pub fn labels(&self) -> usize {
        self.inner.spec().labels
    }

    /// Tokens of the longest text, special ones included; longer ones are cut off.
    pub fn max_tokens(&self) -> usize {
        self.tokenizer.max_tokens
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    /// The vectors of texts, at their own lengths.
    ///
    /// # Errors
    /// Those of the tokenizer and of [`TextEncoder::embed`].
    pub fn embed(&mut self, texts: &[impl AsRef<str>], pooling: Pooling) -> Result<Vec<Embedded>> {
        let most = self.max_tokens();
        let inputs = texts
            .iter()
            .map(|text| self.tokenizer.text(text.as_ref(), most));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let views: Vec<_> = inputs.iter().map(EncoderInput::as_text).collect();
        let vectors = self.vectors(&views, pooling)?;
        let embedded = vectors
            .into_iter()
            .zip(inputs)
            .map(|(vector, input)| Embedded {
                vector,
                tokens: input.tokens.len(),
                cut: input.is_cut(),
            });
        Ok(embedded.collect())
    }

    fn vectors(&mut self, texts: &[TextInput<'_>], pooling: Pooling) -> Result<Vec<Vec<f32>>> {
        let pooled = self.inner.embed(texts, pooling)?;
        let vectors = pooled.into_iter().map(|vector| self.dense.apply(vector));
        Ok(vectors.collect())
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
            let reason = format!(
                "scores of a pair: found {labels}, expected one, which a reranker gives\nhint: `ferrum embed` makes vectors of texts, whose products order them"
            );
            return Err(Error::invalid("rerank", reason));
        }
        let inputs = self.tokenizer.pairs(query, documents, self.max_tokens())?;
        let views: Vec<_> = inputs.iter().map(EncoderInput::as_text).collect();
        let logits = self.inner.classify(&views)?;
        let scores = logits.iter().flatten().map(|&logit| Self::score(logit));
        let cut = inputs.iter().filter(|input| input.is_cut()).count();
        Ok((scores.collect(), cut))
    }

    /// The score of a pair, from 0 to 1, that a logit means.
    pub fn score(logit: f32) -> f32 {
        (1.0 / (1.0 + f64::from(-logit).exp())) as f32
    }
}

/// Whether quantised weights are worth keeping, as for [decoders](ferrum_models::Model::keeps_blocks).
fn keeps_blocks(model: &EncoderModel) -> bool {
    let spec = &model.spec;
    let maps = if spec.gated { 3 } else { 2 };
    let layer = 4 * spec.hidden_size + maps * spec.intermediate;
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
