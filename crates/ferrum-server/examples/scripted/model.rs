//! A model that says what a script has it say, at any context and at once: for clients whose first prompt fills a
//! model that is small enough to run in a test.
//!
//! All but the arithmetic is real: the engine, its scheduler and its KV pool, a tokenizer, and a chat template with
//! calls of tools in Hermes' form. The runner keeps in the KV pool which token was written where; to choose the next
//! one it reads the whole sequence back from there, as attention does.

use ferrum_engine::{Engine, EngineConfig, SamplingParams, StepRunner};
use ferrum_formats::chat_template::ChatTemplate;
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_formats::{Gguf, ModelSource};
use ferrum_models::{
    DecoderSpec, KvLayout, Readback, RowOutput, RunnerConfig, StepBatch, StepOutput, Ticket,
    read_model,
};
use ferrum_server::{LoadedModel, ServedModel};
use ferrum_types::{Result, TokenId};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::sync::Arc;

/// Gives the runner a shape; nothing of it is computed.
static DEMO: &[u8] = include_bytes!("../../../../assets/demo/ferrum-demo.gguf");

/// The vocabulary is made of the words of these texts, which speak of what agents' prompts speak of. A prompt has
/// a third more tokens with it than with Qwen's.
const TEXTS: [&str; 8] = [
    include_str!("../../../../README.md"),
    include_str!("../../../../ARCHITECTURE.md"),
    include_str!("../../../../CHANGELOG.md"),
    include_str!("../../../../docs/serving.md"),
    include_str!("../../../../docs/commands.md"),
    include_str!("../../../../docs/performance.md"),
    include_str!("../../../../docs/guides/clients.md"),
    include_str!("../../../../docs/guides/troubleshooting.md"),
];

const TEMPLATE: &str = "\
{%- if tools %}<|im_start|>system\n<|tools|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n
{%- if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
{%- else %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endif %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Tokens beside the vocabulary, and whether they are special. The order is that of their ids.
const ADDED: [(&str, bool); 9] = [
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<|tools|>", true),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("<think>", false),
    ("</think>", false),
];

/// Longest pieces of words in the vocabulary, in characters, and how often they have to occur.
const LONGEST_PIECE: usize = 4;
const MIN_PIECES: usize = 4;

/// By this word of the last message, requests that have a conversation summed up are known.
const SUMMARY: &str = "summary";

/// Logit of the token that is to be said; all others have 0, so no temperature makes another one likely.
const CERTAIN: f32 = 1e4;

/// Answers that are remembered from step to step.
const REMEMBERED: usize = 16;

/// Most sequences at a time.
const MAX_SEQS: usize = 4;

/// What the model says.
///
/// Agents send more than the turns of a task: they have titles written, and conversations summed up. So the
/// prompt decides: the script is for those that offer tools, have [`task`](Self::task) in them, and do not end with a
/// user who speaks of a summary (one is to be written, or takes the place of the conversation). The turn is the number
/// of messages of the assistant that they have already. A request that is sent again gets the same turn.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Script {
    /// A text that the prompts of the task have in them, and others not.
    pub(crate) task: String,
    /// The raw text of each turn, calls and thoughts included. `{last_result}` is the text of the last result of a
    /// tool, without spaces around it.
    pub(crate) turns: Vec<String>,
    /// What all other prompts get, and turns beyond the last.
    pub(crate) otherwise: String,
}

/// A model of `context` tokens that says `script`.
///
/// # Errors
/// When the vocabulary or the template cannot be made, or the engine does not start.
pub(crate) fn load(
    script: Script,
    context: usize,
) -> std::result::Result<LoadedModel, Box<dyn Error>> {
    let tokenizer = Arc::new(tokenizer()?);
    let no_specials: [(&str, &str); 0] = [];
    let template = ChatTemplate::from_source(TEMPLATE, no_specials)?;
    let mut spec = read_model(ModelSource::Gguf(Gguf::from_static(DEMO)?))?.spec;
    spec.vocab_size = tokenizer.vocab_size();
    spec.context_length = context;
    let config = RunnerConfig {
        context,
        max_seqs: MAX_SEQS,
        max_tokens: 8192,
        max_logit_rows: 2 * MAX_SEQS,
        kv_tokens: context * MAX_SEQS,
        kept_states: 0,
        layout: KvLayout::Paged { block_size: 32 },
        profile: false,
    };
    let (vocab_size, hidden_size) = (spec.vocab_size, spec.hidden_size);
    let runner = ScriptedRunner::new(spec, config, Turns::new(script, Arc::clone(&tokenizer))?);
    let runner: Box<dyn StepRunner> = Box::new(runner);
    let engine = Engine::start(
        runner,
        Some(Arc::clone(&tokenizer)),
        EngineConfig::default(),
    )?;
    let model = ServedModel {
        engine: engine.handle(),
        template: Some(template),
        call_format: None,
        open_schemas: false,
        context,
        vision: None,
        vocab_size,
        generates: true,
        stop_tokens: tokenizer.eos_ids().to_vec(),
        pooling: None,
        dense: Default::default(),
        prompts: Default::default(),
        embedding_size: hidden_size,
        sampling: SamplingParams::default(),
        tokenizer,
    };
    Ok(LoadedModel::Decoder(engine, Box::new(model)))
}

/// A vocabulary of bytes, and of words and pieces of words of [`TEXTS`], in the form of a `tokenizer.json`. All have
/// the same score, so a text becomes the fewest tokens that write it, and every text comes back as it was.
fn tokenizer() -> std::result::Result<Tokenizer, Box<dyn Error>> {
    let mut pieces: BTreeMap<String, usize> = BTreeMap::new();
    for word in TEXTS.iter().flat_map(|text| words(text)) {
        let spaced = format!(" {word}");
        let letters: Vec<_> = spaced.char_indices().map(|(at, _)| at).collect();
        for (i, &start) in letters.iter().enumerate() {
            for length in 2..=LONGEST_PIECE.min(letters.len() - i) {
                let end = letters.get(i + length).copied().unwrap_or(spaced.len());
                *pieces.entry(spaced[start..end].to_owned()).or_default() += 1;
            }
        }
        for whole in [word, &spaced] {
            *pieces.entry(whole.to_owned()).or_default() += MIN_PIECES;
        }
    }
    pieces.retain(|piece, &mut times| times >= MIN_PIECES && piece.len() > 1);
    let mut vocab = vec![json!(["<unk>", 0.0])];
    vocab.extend((0..=255).map(|byte| json!([byte_letter(byte).to_string(), -1.0])));
    vocab.extend(
        pieces
            .keys()
            .map(|piece| json!([piece.bytes().map(byte_letter).collect::<String>(), -1.0])),
    );
    let added = ADDED.iter().zip(vocab.len()..).map(|((text, special), id)| {
        json!({"id": id, "content": text, "special": special, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let file = json!({
        "version": "1.0",
        "added_tokens": added.collect::<Vec<Value>>(),
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": vocab},
    });
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string())?;
    let config = json!({"eos_token": "<|im_end|>"});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string())?;
    Ok(Tokenizer::from_hf_dir(dir.path())?)
}

/// Runs of letters, digits or other marks, each with the space before it.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let kind = |c: char| (c.is_alphabetic(), c.is_numeric(), c.is_whitespace());
    let runs = text
        .split_inclusive(char::is_whitespace)
        .flat_map(move |run| {
            let same = move |a: &char, b: &char| kind(*a) == kind(*b);
            let letters: Vec<_> = run.trim_end().chars().collect();
            let mut at = 0;
            let ends = letters
                .chunk_by(same)
                .map(|run| run.iter().map(|c| c.len_utf8()).sum::<usize>());
            ends.map(|length| {
                at += length;
                &run[at - length..at]
            })
            .collect::<Vec<_>>()
        });
    runs.filter(|run| !run.is_empty())
}

/// The letter for a byte in the alphabet of byte-level vocabularies: itself where it can be seen, else one of those from
/// 256 on, in order.
fn byte_letter(byte: u8) -> char {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match seen(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|&byte| !seen(byte)).count();
            char::from_u32(256 + before as u32).unwrap_or_default()
        }
    }
}

/// A script, and what of it was said lately.
struct Turns {
    script: Script,
    tokenizer: Arc<Tokenizer>,
    /// Prompts with their answers, the newest last.
    answers: VecDeque<(Vec<TokenId>, Vec<TokenId>)>,
    marks: Marks,
}

/// Tokens by which a prompt is understood.
struct Marks {
    /// Begins a message, and ends one.
    start: TokenId,
    end: TokenId,
    /// Begins a list of tools.
    tools: TokenId,
    /// Around the result of a tool.
    result: [TokenId; 2],
    /// What follows `start` in messages of the assistant and of the user, and in the prompt for an answer.
    assistant: Vec<TokenId>,
    user: Vec<TokenId>,
    header: Vec<TokenId>,
}

impl Turns {
    fn new(script: Script, tokenizer: Arc<Tokenizer>) -> std::result::Result<Self, Box<dyn Error>> {
        let id = |text: &str| {
            let id = tokenizer.token_id(text);
            id.ok_or_else(|| format!("the vocabulary has no {text:?}"))
        };
        let marks = Marks {
            start: id("<|im_start|>")?,
            end: id("<|im_end|>")?,
            tools: id("<|tools|>")?,
            result: [id("<tool_response>")?, id("</tool_response>")?],
            assistant: tokenizer.encode("assistant", EncodeOptions::PROMPT)?,
            user: tokenizer.encode("user", EncodeOptions::PROMPT)?,
            header: tokenizer.encode("assistant\n", EncodeOptions::PROMPT)?,
        };
        Ok(Self {
            script,
            tokenizer,
            answers: VecDeque::new(),
            marks,
        })
    }

    /// The token after a sequence: a prompt, and what was said to it so far.
    fn next(&mut self, sequence: &[TokenId]) -> TokenId {
        let start = sequence.iter().rposition(|&id| id == self.marks.start);
        let prompt_len = start.map_or(0, |at| at + 1) + self.marks.header.len();
        let (prompt, said) = sequence.split_at(prompt_len.min(sequence.len()));
        let known = self.answers.iter().position(|(known, _)| known == prompt);
        let known = known.unwrap_or_else(|| {
            let answer = self.answer(prompt);
            if self.answers.len() == REMEMBERED {
                self.answers.pop_front();
            }
            self.answers.push_back((prompt.to_vec(), answer));
            self.answers.len() - 1
        });
        let next = self.answers[known].1.get(said.len());
        next.copied().unwrap_or(self.marks.end)
    }

    /// What a prompt is answered with.
    fn answer(&self, prompt: &[TokenId]) -> Vec<TokenId> {
        let Marks {
            start,
            tools,
            result: [open, close],
            assistant,
            user,
            ..
        } = &self.marks;
        let read = |ids: &[TokenId]| self.tokenizer.decode(ids, false);
        let messages: Vec<_> = prompt.split(|id| id == start).skip(1).collect();
        // The last one is the answer to come.
        let before = &messages[..messages.len().saturating_sub(1)];
        let side = before
            .last()
            .is_some_and(|last| last.starts_with(user) && read(last).contains(SUMMARY));
        let turn = before.iter().filter(|one| one.starts_with(assistant));
        let turn = match prompt.contains(tools) && read(prompt).contains(&self.script.task) {
            true if !side => self.script.turns.get(turn.count()),
            _ => None,
        };
        let last = prompt.iter().rposition(|id| id == open);
        let last = last.map_or(&[][..], |at| &prompt[at + 1..]);
        let last = read(last.split(|id| id == close).next().unwrap_or_default());
        let text = turn.unwrap_or(&self.script.otherwise);
        let text = text.replace("{last_result}", last.trim());
        let encoded = self.tokenizer.encode(&text, EncodeOptions::PROMPT);
        encoded.unwrap_or_default()
    }
}

/// Keeps books of tokens, and has [`Turns`] choose the next one.
struct ScriptedRunner {
    spec: DecoderSpec,
    config: RunnerConfig,
    turns: Turns,
    /// The token in each cell of the KV pool.
    cells: Vec<TokenId>,
    /// What the last step gave.
    ready: StepOutput,
    steps: u64,
}

impl ScriptedRunner {
    fn new(spec: DecoderSpec, config: RunnerConfig, turns: Turns) -> Self {
        let pool = config.pool_shape(&spec);
        Self {
            cells: vec![0; pool.blocks * pool.block_size],
            ready: StepOutput::default(),
            steps: 0,
            spec,
            config,
            turns,
        }
    }
}

impl StepRunner for ScriptedRunner {
    fn backend(&self) -> &'static str {
        "scripted"
    }

    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn config(&self) -> &RunnerConfig {
        &self.config
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        let block_size = self.pool().block_size;
        let mut rows: BTreeMap<usize, TokenId> = BTreeMap::new();
        for seq in 0..batch.seqs() {
            let table = batch.table(0, seq);
            let cell = |at: usize| table[at / block_size].0 as usize * block_size + at % block_size;
            for row in batch.rows(seq) {
                self.cells[cell(batch.positions[row] as usize)] = batch.tokens[row];
            }
            for &row in &batch.logit_rows {
                let row = row as usize;
                if batch.rows(seq).contains(&row) {
                    let length = batch.positions[row] as usize + 1;
                    let sequence: Vec<_> = (0..length).map(|at| self.cells[cell(at)]).collect();
                    rows.insert(row, self.turns.next(&sequence));
                }
            }
        }
        self.ready.begin(
            wanted,
            self.spec.vocab_size,
            self.spec.hidden_size * batch.hidden_rows.len(),
        );
        self.ready.hidden_mut().fill(0.0);
        for (index, row) in batch.logit_rows.iter().enumerate() {
            let token = rows.get(&(*row as usize)).copied().unwrap_or_default();
            self.ready.set_token(index, Ok(token));
            if let RowOutput::Logits(logits) = self.ready.row(index) {
                logits.fill(0.0);
                logits[token as usize] = CERTAIN;
            }
        }
        self.steps += 1;
        Ok(Ticket::new(self.steps))
    }

    fn collect(&mut self, _: Ticket, out: &mut StepOutput) -> Result<()> {
        std::mem::swap(&mut self.ready, out);
        Ok(())
    }
}
