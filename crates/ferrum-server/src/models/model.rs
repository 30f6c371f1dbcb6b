//! A model as this crate sees it: an engine, a tokenizer and a template.

use crate::error::ApiError;
use crate::models::adapters::LoadedAdapters;
use crate::models::info::{ModelInfo, ModelKind, SamplingDefaults};
use crate::models::vision::ServedVision;
use crate::output::CallFormat;
use crate::prompt::special_token_escape::{self, SpecialTokenEscaper};
use crate::prompt::template_limits::TemplateLimits;
use ferrum_engine::engine::{DenseLayers, EmbeddingPrompts, Pooling};
use ferrum_engine::grammar::GrammarCompiler;
use ferrum_engine::{Dry, DryBreakers, EngineHandle, SamplingParams};
use ferrum_formats::chat_template::{ChatInput, ChatTemplate};
use ferrum_formats::tokenizer::{EncodeOptions, FimTokens, Tokenizer};
use ferrum_types::TokenId;
use serde_json::Value;
use std::sync::{Arc, OnceLock};

/// A loaded model.
#[derive(Debug)]
pub struct ServedModel {
    /// Runs it.
    pub engine: EngineHandle,
    /// Text to tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Conversations to text; without one there is no chat.
    pub template: Option<ChatTemplate>,
    /// How it writes calls of tools; `None`: as its template says.
    pub call_format: Option<CallFormat>,
    /// Whether objects of JSON schemas may have keys that their properties do not list, as the standard has it
    /// where a schema does not say.
    pub open_schemas: bool,
    /// Most tokens of a sequence.
    pub context: usize,
    /// What sees images, if it does.
    pub vision: Option<ServedVision>,
    /// Number of logits.
    pub vocab_size: usize,
    /// Whether it generates text. Others make embeddings alone.
    pub generates: bool,
    /// Tokens at which an answer ends.
    pub stop_tokens: Vec<TokenId>,
    /// How states of a text become its embedding; `None` where the model's files ask for a way that is
    /// not known here.
    pub pooling: Option<Pooling>,
    /// What makes embeddings of pooled states.
    pub dense: DenseLayers,
    /// What it may be given before texts that become embeddings.
    pub prompts: EmbeddingPrompts,
    /// Elements of an embedding.
    pub embedding_size: usize,
    /// What holds where a request says nothing: what the model recommends, and neutral values.
    pub sampling: SamplingParams,
}

/// A [`ServedModel`] with what is computed of it once.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) served: ServedModel,
    pub(crate) adapters: LoadedAdapters,
    pub(crate) grammars: GrammarCompiler,
    special_token_escaper: OnceLock<SpecialTokenEscaper>,
    limits: OnceLock<TemplateLimits>,
    breakers: OnceLock<DryBreakers>,
    fim: OnceLock<Option<FimTokens>>,
}

impl Model {
    pub(crate) fn new(served: ServedModel) -> Self {
        let tokenizer = Arc::clone(&served.tokenizer);
        Self {
            grammars: GrammarCompiler::new(tokenizer, served.vocab_size),
            served,
            adapters: LoadedAdapters::default(),
            special_token_escaper: OnceLock::new(),
            limits: OnceLock::new(),
            breakers: OnceLock::new(),
            fim: OnceLock::new(),
        }
    }

    /// What is known of it from now on.
    pub(crate) fn info(&self) -> ModelInfo {
        ModelInfo {
            kind: ModelKind::Decoder,
            defaults: Some(self.sampling_defaults()),
            context: Some(self.served.context),
            kv_tokens: Some(self.served.engine.kv_tokens()),
        }
    }

    /// The samplers that hold where a request names none.
    pub(crate) fn sampling_defaults(&self) -> SamplingDefaults {
        let sampling = &self.served.sampling;
        SamplingDefaults {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
        }
    }

    pub(crate) fn encode(
        &self,
        param: &str,
        text: &str,
        options: EncodeOptions,
    ) -> Result<Vec<TokenId>, ApiError> {
        let tokens = special_token_escape::encode(&self.served.tokenizer, text, options);
        tokens.map_err(|e| ApiError::invalid(param, e.to_string()))
    }

    /// The special tokens, to be found in what users say.
    pub(crate) fn special_token_escaper(&self) -> &SpecialTokenEscaper {
        let find = || SpecialTokenEscaper::new(&self.served.tokenizer);
        self.special_token_escaper.get_or_init(find)
    }

    /// The tokens that fill in the middle, if it has such.
    pub(crate) fn fim(&self) -> Option<&FimTokens> {
        let find = || self.served.tokenizer.fim();
        self.fim.get_or_init(find).as_ref()
    }

    /// What its template takes.
    pub(crate) fn template_limits(&self) -> TemplateLimits {
        let render = |messages: &Value| self.render(&ChatInput::new(messages)).ok();
        *self.limits.get_or_init(|| TemplateLimits::probe(render))
    }

    /// The prompt of a conversation.
    pub(crate) fn render(&self, input: &ChatInput<'_>) -> Result<String, ApiError> {
        let Some(template) = &self.served.template else {
            let reason = "this model has no chat template; use /v1/completions";
            return Err(ApiError::unsupported("messages", reason));
        };
        let text = template.render(input);
        text.map_err(|e| ApiError::invalid("messages", format!("the chat template says: {e}")))
    }

    /// The text of the template that is used where there are tools; empty without one.
    pub(crate) fn template_source(&self) -> &str {
        let template = self.served.template.as_ref();
        template.and_then(|t| t.source(true)).unwrap_or_default()
    }

    /// Texts at which DRY's passages end, when a request names none. They take a look at the whole
    /// vocabulary, so they are prepared when they are first needed.
    pub(crate) fn default_breakers(&self) -> &DryBreakers {
        let find = || DryBreakers::find(&self.served.tokenizer, &Dry::DEFAULT_BREAKERS);
        self.breakers.get_or_init(find)
    }

    /// The text of a token as its log-probability is listed.
    pub(crate) fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        let bytes = self.served.tokenizer.token_bytes(token);
        bytes.unwrap_or_default()
    }
}
