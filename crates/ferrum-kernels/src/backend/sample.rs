//! Choosing tokens on the device, so that rows of logits stay there: a row is as long as the vocabulary, and what the
//! host wants of it is four bytes.

use super::{Backend, DeviceBuffer, Logits};
use ferrum_types::{Error, Result, TokenId};
use std::fmt;

/// Most alternatives whose log-probabilities a device gives.
pub const MAX_LOGPROBS: usize = 32;

/// How the token of one row is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSampling {
    /// 0: the most likely token; else logits are divided by it.
    pub temperature: f32,
    /// Only so many of the most likely tokens; 0: all.
    pub top_k: u32,
    /// Only the most likely tokens that together reach this probability; from 1 on: all.
    pub top_p: f32,
    /// Only tokens at least this probable relative to the most likely one; 0: all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that are [recent](LogitAdjustment::recent).
    pub repeat_penalty: f32,
    /// Taken from the logit of each token of the answer.
    pub presence_penalty: f32,
    /// Taken from the logit of each token of the answer as often as it is there.
    pub frequency_penalty: f32,
    /// Where the draw falls, from 0 to below 1.
    pub uniform: f64,
    /// The row of the step before whose choice is the last token of the sequence, where the host does not know it
    /// yet: it is recent, and one more of the answer.
    pub pending_row: Option<u32>,
    /// Alternatives whose log-probabilities are wanted beside that of the token, at most [`MAX_LOGPROBS`]; `None`:
    /// no log-probabilities. They are those of the row as it came, before the chain.
    pub logprobs: Option<u32>,
}

impl Default for RowSampling {
    /// The most likely token.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            uniform: 0.0,
            pending_row: None,
            logprobs: None,
        }
    }
}

impl RowSampling {
    /// Whether a draw goes through the most likely tokens first, and not through ids.
    pub fn draws_by_rank(&self, vocab: usize) -> bool {
        self.top_p < 1.0 || self.cuts_to_k(vocab)
    }

    /// Whether top-k leaves anything out of a row of `vocab` logits.
    pub fn cuts_to_k(&self, vocab: usize) -> bool {
        self.top_k > 0 && (self.top_k as usize) < vocab
    }

    /// `logit` with the repetition penalty applied.
    pub fn with_repetition_penalty(&self, logit: f32) -> f32 {
        match logit > 0.0 {
            true => logit / self.repeat_penalty,
            false => logit * self.repeat_penalty,
        }
    }

    /// `logit` of a token with its bias and its penalties applied.
    pub fn adjusted(&self, logit: f32, change: &LogitAdjustment) -> f32 {
        let mut x = logit + change.bias;
        if change.recent {
            x = self.with_repetition_penalty(x);
        }
        if change.generated > 0 {
            x -= self.presence_penalty + self.frequency_penalty * change.generated as f32;
        }
        x
    }
}

/// Bias and penalty counts of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitAdjustment {
    /// Which.
    pub token: u32,
    /// Added to its logit; −∞ forbids it.
    pub bias: f32,
    /// Whether it is among the tokens that the repetition penalty looks at.
    pub recent: bool,
    /// How often it is in the answer.
    pub generated: u32,
}

impl LogitAdjustment {
    /// A token that nothing is changed of yet.
    pub fn none(token: u32) -> Self {
        Self {
            token,
            bias: 0.0,
            recent: false,
            generated: 0,
        }
    }

    /// The adjustment after one more occurrence of the token in the answer.
    #[must_use]
    pub fn with_occurrence(self) -> Self {
        Self {
            recent: true,
            generated: self.generated.saturating_add(1),
            ..self
        }
    }
}

/// How the tokens of some rows are chosen. Made to be filled again: a steady step allocates nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampleBatch {
    rows: Vec<RowSampling>,
    changes: Vec<LogitAdjustment>,
    /// Where the changes and the words of each row's mask end.
    ends: Vec<(usize, usize)>,
    masks: Vec<u32>,
}

impl SampleBatch {
    /// Empties it.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.changes.clear();
        self.ends.clear();
        self.masks.clear();
    }

    /// Adds a row. Of `changes` a token may be in one only. `mask` has a bit for each token, from the least
    /// significant one of its first word on, set where the token is allowed; a token behind its end is forbidden.
    pub fn push(
        &mut self,
        row: RowSampling,
        changes: impl IntoIterator<Item = LogitAdjustment>,
        mask: Option<&[u32]>,
    ) {
        self.rows.push(row);
        self.changes.extend(changes);
        self.masks.extend_from_slice(mask.unwrap_or_default());
        self.ends.push((self.changes.len(), self.masks.len()));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Row `index`, its changes, and its mask: empty where all is allowed.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn row(&self, index: usize) -> (&RowSampling, &[LogitAdjustment], &[u32]) {
        let (first, first_word) = match index {
            0 => (0, 0),
            _ => self.ends[index - 1],
        };
        let (end, end_word) = self.ends[index];
        let changes = &self.changes[first..end];
        (
            &self.rows[index],
            changes,
            &self.masks[first_word..end_word],
        )
    }

    /// The rows.
    pub fn rows(&self) -> &[RowSampling] {
        &self.rows
    }

    /// Changes of all rows, one row after the other.
    pub fn changes(&self) -> &[LogitAdjustment] {
        &self.changes
    }

    /// Words of all masks, one row after the other.
    pub fn masks(&self) -> &[u32] {
        &self.masks
    }

    /// How many words [`write_words`](Self::write_words) appends.
    pub fn words_len(&self) -> usize {
        self.len() * SETTING_WORDS + self.changes.len() * CHANGE_WORDS + self.masks.len()
    }

    /// Appends all of it as words in the form that devices read: 16 of settings for each row, then 4 for each
    /// change, then the masks.
    ///
    /// Settings are, in this order: temperature, top-k, top-p, the logarithm of min-p, the repetition, presence and
    /// frequency penalties, the unit, the last row + 1, the log-probabilities + 1, the words where the row's changes
    /// begin and end and where its mask begins and ends, flags (1: top-p cuts, 2: min-p does), and min-p. A change is a
    /// token, its bias, a bit of whether it is recent below how often it was generated, and a word for the device's
    /// own use. Numbers that are not counts are those of an f32.
    pub fn write_words(&self, words: &mut Vec<i32>) {
        let first_change = self.len() * SETTING_WORDS;
        let mut starts = (
            first_change,
            first_change + self.changes.len() * CHANGE_WORDS,
        );
        for index in 0..self.len() {
            let (row, changes, mask) = self.row(index);
            let ends = (
                starts.0 + changes.len() * CHANGE_WORDS,
                starts.1 + mask.len(),
            );
            let flag = |holds: bool, flag: u32| if holds { flag } else { 0 };
            let settings: [u32; SETTING_WORDS] = [
                // The two zeros are one.
                (row.temperature + 0.0).to_bits(),
                row.top_k,
                row.top_p.to_bits(),
                row.min_p.ln().to_bits(),
                row.repeat_penalty.to_bits(),
                row.presence_penalty.to_bits(),
                row.frequency_penalty.to_bits(),
                (row.uniform as f32).to_bits(),
                row.pending_row.map_or(0, |last| last + 1),
                row.logprobs.map_or(0, |n| n + 1),
                starts.0 as u32,
                ends.0 as u32,
                starts.1 as u32,
                ends.1 as u32,
                flag(row.top_p < 1.0, CUTS_TO_P) | flag(row.min_p > 0.0, CUTS_TO_MIN_P),
                row.min_p.to_bits(),
            ];
            words.extend(settings.map(u32::cast_signed));
            starts = ends;
        }
        for change in &self.changes {
            let seen = u32::from(change.recent) | change.generated << 1;
            let change = [change.token, change.bias.to_bits(), seen, 0];
            words.extend(change.map(u32::cast_signed));
        }
        words.extend(self.masks.iter().map(|word| word.cast_signed()));
    }

    /// The first `rows` rows of what [`write_words`](Self::write_words) wrote, for a device whose memory the host
    /// sees. Numbers are rounded to f32.
    ///
    /// # Errors
    /// `Shape` when there are fewer words.
    pub fn of_words(rows: usize, words: &[i32]) -> Result<Self> {
        let mut batch = Self::default();
        for index in 0..rows {
            let settings = range(words, (index * SETTING_WORDS, (index + 1) * SETTING_WORDS))?;
            let settings: Vec<u32> = settings.iter().map(|word| word.cast_unsigned()).collect();
            let float = |at: usize| f32::from_bits(settings[at]);
            let (first, end) = (settings[10] as usize, settings[11] as usize);
            let changes = range(words, (first, end))?.chunks_exact(CHANGE_WORDS);
            let changes = changes.map(|change| LogitAdjustment {
                token: change[0].cast_unsigned(),
                bias: f32::from_bits(change[1].cast_unsigned()),
                recent: change[2] & 1 == 1,
                generated: change[2].cast_unsigned() >> 1,
            });
            let mask = range(words, (settings[12] as usize, settings[13] as usize))?;
            let mask: Vec<u32> = mask.iter().map(|word| word.cast_unsigned()).collect();
            let row = RowSampling {
                temperature: float(0),
                top_k: settings[1],
                top_p: float(2),
                min_p: float(15),
                repeat_penalty: float(4),
                presence_penalty: float(5),
                frequency_penalty: float(6),
                uniform: f64::from(float(7)),
                pending_row: settings[8].checked_sub(1),
                logprobs: settings[9].checked_sub(1),
            };
            batch.push(row, changes, (!mask.is_empty()).then_some(&mask));
        }
        Ok(batch)
    }

    /// Holds the rows against the buffers of [`BackendSample::sample_rows`].
    ///
    /// # Errors
    /// Those of `sample_rows`.
    pub fn check<B: Backend>(
        &self,
        logits: &Logits<B>,
        shape: SampleShape,
        previous: &B::Buffer<i32>,
        out: &Sampled<B>,
    ) -> Result<()> {
        const OP: &str = "sample_rows";
        let fail = |reason: String| Err(Error::invalid(OP, reason));
        let SampleShape { vocab, first } = shape;
        if vocab == 0 || i32::try_from(vocab).is_err() {
            return fail(format!(
                "rows have {vocab} logits, expected 1 to {}",
                i32::MAX
            ));
        }
        let end = first.saturating_add(self.len());
        Error::check_len(OP, "logits", logits.len(), end.saturating_mul(vocab))?;
        Error::check_len(OP, "tokens", out.tokens.len(), end)?;
        let beside = end.saturating_mul(1 + MAX_LOGPROBS);
        Error::check_len(OP, "ranks", out.ranks.len(), beside)?;
        Error::check_len(OP, "logprobs", out.logprobs.len(), beside)?;
        for index in 0..self.len() {
            let (row, changes, _) = self.row(index);
            let last = row.pending_row.map_or(0, |last| last as usize + 1);
            Error::check_len(OP, "previous", previous.len(), last)?;
            let settings = [
                ("temperature", row.temperature, 0.0..=f32::MAX),
                ("top-p", row.top_p, 0.0..=f32::MAX),
                ("min-p", row.min_p, 0.0..=1.0),
                (
                    "the repetition penalty",
                    row.repeat_penalty,
                    f32::MIN_POSITIVE..=f32::MAX,
                ),
                ("the number drawn", row.uniform as f32, 0.0..=1.0),
            ];
            if let Some((name, found, _)) = settings.iter().find(|(_, x, good)| !good.contains(x)) {
                return fail(format!("row {index}: {name} is {found}"));
            }
            if let Some(n) = row.logprobs.filter(|&n| n as usize > MAX_LOGPROBS) {
                return fail(format!(
                    "row {index}: {n} log-probabilities, at most {MAX_LOGPROBS}"
                ));
            }
            if let Some(change) = changes.iter().find(|c| c.token as usize >= vocab) {
                let token = change.token;
                return fail(format!(
                    "row {index}: token {token} of a vocabulary of {vocab}"
                ));
            }
        }
        Ok(())
    }
}

/// Words of a row's settings and of a change.
const SETTING_WORDS: usize = 16;
const CHANGE_WORDS: usize = 4;
/// Flags among the settings: whether top-p and min-p leave anything out.
const CUTS_TO_P: u32 = 1;
const CUTS_TO_MIN_P: u32 = 2;

fn range(words: &[i32], (first, end): (usize, usize)) -> Result<&[i32]> {
    words.get(first..end).ok_or(Error::Shape {
        op: "sample_rows",
        what: "words",
        found: words.len(),
        expected: end,
    })
}

/// A [`SampleBatch`] where a device finds it. Like the rest of a step's state it is filled before the ops that read it
/// are recorded, so that a graph can be replayed over other settings.
pub struct DeviceSampling<B: Backend> {
    /// As the host has it. Its number of rows is that of the op.
    pub rows: SampleBatch,
    /// What the device reads of it: [`sampling_words`](BackendSample::sampling_words). It may be longer.
    pub words: B::Buffer<i32>,
}

impl<B: BackendSample> DeviceSampling<B> {
    /// `rows`, uploaded.
    ///
    /// # Errors
    /// `OutOfMemory`; what the device says.
    pub fn new(device: &B, rows: SampleBatch) -> Result<Self> {
        let mut words = Vec::new();
        device.sampling_words(&rows, &mut words);
        Ok(Self {
            words: device.from_slice(&words)?,
            rows,
        })
    }
}

/// A token and its natural log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Which token.
    pub token: TokenId,
    /// At most 0; `-inf` for what cannot be.
    pub logprob: f32,
}

/// Log-probabilities of the chosen token and of the top alternatives, before penalties and sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The token that is there.
    pub chosen: TokenLogprob,
    /// Its place among all tokens, 1 for the most likely.
    pub rank: usize,
    /// The most likely tokens, best first, lower ids first among equals.
    pub top: Vec<TokenLogprob>,
}

impl Logprobs {
    /// Of a row of [`Sampled`]: its token, its [ranks](Sampled::ranks) and its [log-probabilities](Sampled::logprobs),
    /// with `top` alternatives.
    pub fn of_row(token: TokenId, ranks: &[i32], logprobs: &[f32], top: usize) -> Self {
        let all = ranks.iter().zip(logprobs);
        let best = all.skip(1).take(top).filter_map(|(&token, &logprob)| {
            let token = TokenId::try_from(token).ok()?;
            Some(TokenLogprob { token, logprob })
        });
        Self {
            chosen: TokenLogprob {
                token,
                logprob: logprobs.first().copied().unwrap_or(f32::NEG_INFINITY),
            },
            rank: ranks.first().map_or(0, |&rank| rank as usize),
            top: best.collect(),
        }
    }
}

/// Why no token can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoToken {
    /// No logit of those in question is a number.
    NotANumber,
    /// Everything is forbidden.
    Forbidden,
}

impl NoToken {
    /// What stands for it in place of a token.
    pub const fn code(self) -> i32 {
        match self {
            NoToken::NotANumber => -1,
            NoToken::Forbidden => -2,
        }
    }

    /// The token that `code` is, or why there is none.
    ///
    /// # Errors
    /// Why there is none.
    pub fn or_token(code: i32) -> std::result::Result<TokenId, Self> {
        match TokenId::try_from(code) {
            Ok(token) => Ok(token),
            Err(_) if code == Self::Forbidden.code() => Err(Self::Forbidden),
            Err(_) => Err(Self::NotANumber),
        }
    }
}

impl fmt::Display for NoToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotANumber => "the model gave no numbers for the next token: its logits are NaN",
            Self::Forbidden => "the request leaves no token that may come next",
        })
    }
}

impl std::error::Error for NoToken {}

/// What became of rows, on the device.
pub struct Sampled<B: Backend> {
    /// `[rows]`: the token, or the [code](NoToken::code) of why there is none.
    pub tokens: B::Buffer<i32>,
    /// `[rows, 1 + MAX_LOGPROBS]`, where log-probabilities are wanted: the rank of the token (1: the most likely),
    /// then the most likely tokens, best first; −1 behind the last that is a number.
    pub ranks: B::Buffer<i32>,
    /// `[rows, 1 + MAX_LOGPROBS]`: their natural log-probabilities, that of the token first.
    pub logprobs: B::Buffer<f32>,
}

impl<B: Backend> Sampled<B> {
    /// Room for `rows` rows.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn alloc(device: &B, rows: usize) -> Result<Self> {
        Ok(Self {
            tokens: device.alloc(rows)?,
            ranks: device.alloc(rows * (1 + MAX_LOGPROBS))?,
            logprobs: device.alloc(rows * (1 + MAX_LOGPROBS))?,
        })
    }
}

/// Which rows of logits a [`SampleBatch`] speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleShape {
    /// Logits in a row.
    pub vocab: usize,
    /// The row of the batch's first row among those of the logits, and of the results.
    pub first: usize,
}

/// Chooses tokens by more than the greatest logit. By default a device does not, and the host reads the rows.
///
/// One that [samples](Self::samples) goes through this chain for a row:
///
/// 1. tokens outside a mask are forbidden
/// 2. biases are added
/// 3. the repetition penalty, then presence and frequency penalties
/// 4. a temperature of 0 ends here: the most likely token, the lowest id of equals
/// 5. temperature
/// 6. top-k, top-p, min-p: each of what the one before it left
/// 7. a draw: the token at which the cumulated probability passes a number that the host has drawn. Where top-k or
///    top-p cuts, the most likely tokens come first (the lowest id of equals), else the order is that of ids
///
/// Probabilities are in proportion to `exp(logit / temperature)`; NaN and −∞ have none. It is the host samplers'
/// chain (`ferrum-engine`), as far as that has these steps, and chance is the host's: the same seed gives the same
/// text on whatever chooses, but for roundings of sums that a draw can fall between.
pub trait BackendSample: Backend {
    /// Whether [`sample_rows`](Self::sample_rows) works.
    fn samples(&self) -> bool {
        false
    }

    /// Appends what this device reads of `batch` while it computes, in the form of
    /// [`write_words`](SampleBatch::write_words). By default nothing: a device whose work runs at once reads the
    /// host's.
    fn sampling_words(&self, batch: &SampleBatch, words: &mut Vec<i32>) {
        let _ = (batch, words);
    }

    /// Puts tokens that `chosen` holds among those of a step: for each `(place, row)`, `tokens[place] = chosen[row]`.
    /// By default a copy for each run of places whose rows follow each other, too.
    ///
    /// # Errors
    /// `Shape` for a place or row that there is not.
    fn take_tokens(
        ctx: &mut Self::Context,
        chosen: &Self::Buffer<i32>,
        places: &[(u32, u32)],
        tokens: &mut Self::Buffer<i32>,
    ) -> Result<()> {
        let follows = |a: &(u32, u32), b: &(u32, u32)| (a.0 + 1, a.1 + 1) == *b;
        for run in places.chunk_by(follows) {
            let (to, from) = (run[0].0 as usize, run[0].1 as usize);
            Self::copy_slice(ctx, chosen, from, tokens, to, run.len())?;
        }
        Ok(())
    }

    /// Chooses a token from each of the rows `shape.first..` of `logits`, `[rows, vocab]`, as
    /// [`BackendSample`] says, into the same rows of `out`. `previous` holds the [tokens](Sampled::tokens) of the step
    /// before, for rows that have a [`pending_row`](RowSampling::pending_row) one. The rows of `logits` may be changed, and words of
    /// `sampling` that are the device's own.
    ///
    /// # Errors
    /// `Shape` for a buffer that is too short; `InvalidArgument` for settings out of range; `Unsupported` where the
    /// device does not sample.
    fn sample_rows(
        ctx: &mut Self::Context,
        logits: &mut Logits<Self>,
        shape: SampleShape,
        sampling: &mut DeviceSampling<Self>,
        previous: &Self::Buffer<i32>,
        out: &mut Sampled<Self>,
    ) -> Result<()> {
        let _ = (ctx, logits, shape, sampling, previous, out);
        Err(Error::Unsupported {
            op: "sample_rows",
            backend: Self::NAME,
            reason: "this backend does not choose tokens".into(),
            hint: "read the rows of logits and choose on the host".into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_what_the_batch_does() {
        let mut batch = SampleBatch::default();
        let change = LogitAdjustment {
            token: 7,
            bias: f32::NEG_INFINITY,
            recent: true,
            generated: 3,
        };
        let row = RowSampling {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.05,
            repeat_penalty: 1.1,
            presence_penalty: -0.5,
            frequency_penalty: 0.25,
            uniform: 0.375,
            pending_row: Some(0),
            logprobs: Some(5),
        };
        batch.push(RowSampling::default(), [], None);
        batch.push(row, [change, LogitAdjustment::none(9)], None);
        batch.push(row, [], Some(&[1, u32::MAX]));
        batch.push(RowSampling::default(), [change], Some(&[0]));
        let mut words = vec![-1, -2];
        batch.write_words(&mut words);
        let words = words.split_off(2);
        assert_eq!(words.len(), batch.words_len());
        assert_eq!(SampleBatch::of_words(4, &words), Ok(batch.clone()));
        // A buffer may be longer, and not shorter.
        let longer = [&words[..], &[5; 3]].concat();
        assert_eq!(SampleBatch::of_words(4, &longer), Ok(batch));
        for len in [0, 40, words.len() - 1] {
            let short = SampleBatch::of_words(4, &words[..len]);
            assert!(matches!(short, Err(Error::Shape { .. })), "{len}");
        }
        assert_eq!(SampleBatch::of_words(0, &[]), Ok(SampleBatch::default()));
    }
}
