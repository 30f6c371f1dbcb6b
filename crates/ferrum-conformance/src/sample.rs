//! Choosing tokens. The formula decides of each token by itself whether it is left in question, from how many are
//! before it and how probable these are together.

use crate::case::{Cases, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{CaseError, Check, Fault, Io, Refusals};
use ferrum_kernels::{
    BackendSample, DeviceSampling, LogitAdjustment, MAX_LOGPROBS, NoToken, RowSampling,
    SampleBatch, SampleShape, Sampled,
};

/// Numbers beside each token.
const BESIDE: usize = 1 + MAX_LOGPROBS;

struct Rows {
    vocab: usize,
    /// Rows of logits before those of the batch.
    first: usize,
    logits: Vec<f32>,
    batch: SampleBatch,
    previous: Vec<i32>,
}

impl Rows {
    /// `count` rows, each with the settings of its number.
    fn new(
        rng: &mut Rng,
        (count, vocab): (usize, usize),
        settings: impl Fn(&mut Rng, usize) -> RowSampling,
    ) -> Self {
        let first = 2;
        let mut batch = SampleBatch::default();
        for index in 0..count {
            let row = RowSampling {
                uniform: f64::from(rng.unit()),
                ..settings(rng, index)
            };
            batch.push(row, [], None);
        }
        Self {
            vocab,
            first,
            logits: rng.acts((first + count) * vocab, 3.0),
            batch,
            previous: vec![0; count],
        }
    }

    /// The same rows with changes of some tokens and a mask.
    fn bent(self, rng: &mut Rng, changes: usize, masked: bool) -> Self {
        let Self { vocab, .. } = self;
        let mut batch = SampleBatch::default();
        for index in 0..self.batch.len() {
            let row = *self.batch.row(index).0;
            let tokens = rng.permutation(vocab);
            let changes: Vec<_> = tokens[..changes.min(vocab)]
                .iter()
                .map(|&token| LogitAdjustment {
                    token: token as u32,
                    bias: match rng.below(4) {
                        0 => f32::NEG_INFINITY,
                        1 => rng.floats(1, 4.0)[0],
                        _ => 0.0,
                    },
                    recent: rng.below(2) == 0,
                    generated: rng.below(3) as u32,
                })
                .collect();
            // The last word of a mask may be missing.
            let words = (vocab.div_ceil(32) - rng.below(2)).max(1);
            let mask: Vec<u32> = (0..words).map(|_| rng.bits() as u32 | 0x11).collect();
            batch.push(row, changes, masked.then_some(&mask[..]));
        }
        Self { batch, ..self }
    }
}

fn sampled<B: BackendSample>(io: &mut Io<'_, B>, data: &Rows) -> Check<Sampled<B>> {
    if !io.device.samples() {
        return Err(ferrum_types::Error::Unsupported {
            op: "sample_rows",
            backend: B::NAME,
            reason: "this backend does not choose tokens".into(),
            hint: String::new(),
        }
        .into());
    }
    let rows = data.first + data.batch.len();
    let mut logits = io.input_of::<B::Logit>("logits", &data.logits)?;
    let previous = io.exact(&data.previous)?;
    let mut out = Sampled {
        tokens: io.index_output("tokens", rows)?,
        ranks: io.index_output("ranks", rows * BESIDE)?,
        logprobs: io.float_output("logprobs", rows * BESIDE)?,
    };
    let shape = SampleShape {
        vocab: data.vocab,
        first: data.first,
    };
    let mut sampling = DeviceSampling::new(io.device, data.batch.clone())?;
    B::sample_rows(
        &mut io.ctx,
        &mut logits,
        shape,
        &mut sampling,
        &previous,
        &mut out,
    )?;
    Ok(out)
}

fn tokens<B: BackendSample>(io: &mut Io<'_, B>, data: &Rows) -> Check {
    let out = sampled(io, data)?;
    io.take_indices("tokens", &out.tokens, data.first + data.batch.len())
}

fn with_logprobs<B: BackendSample>(io: &mut Io<'_, B>, data: &Rows) -> Check {
    let out = sampled(io, data)?;
    let rows = data.first + data.batch.len();
    io.take_floats("logprobs", &out.logprobs, rows * BESIDE)?;
    io.take_indices("ranks", &out.ranks, rows * BESIDE)?;
    io.take_indices("tokens", &out.tokens, rows)
}

/// Rows before the first, which are not written.
fn untouched(count: usize, poison: f64) -> Vec<f64> {
    vec![poison; count]
}

fn tokens_formula(data: &Rows) -> Vec<Vec<f64>> {
    let mut tokens = untouched(data.first, f64::from(i32::MIN + 7));
    tokens.extend((0..data.batch.len()).map(|index| f64::from(choose(data, index))));
    vec![tokens]
}

fn logprobs_formula(data: &Rows) -> Vec<Vec<f64>> {
    let mut ranks = untouched(data.first * BESIDE, f64::from(i32::MIN + 7));
    let mut logprobs = untouched(data.first * BESIDE, f64::NAN);
    for index in 0..data.batch.len() {
        let logits = row_of(data, index);
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        let rank = |token: usize| {
            1 + (0..data.vocab)
                .filter(|&i| before(logits, i, token))
                .count()
        };
        let token = choose(data, index) as usize;
        let mut best: Vec<usize> = (0..data.vocab).collect();
        best.sort_by_key(|&token| rank(token));
        ranks.push(rank(token) as f64);
        ranks.extend(best[..MAX_LOGPROBS].iter().map(|&token| token as f64));
        let told = std::iter::once(&token).chain(&best[..MAX_LOGPROBS]);
        logprobs.extend(told.map(|&token| (f64::from(logits[token]).exp() / sum).ln()));
    }
    let tokens = tokens_formula(data).remove(0);
    vec![logprobs, ranks, tokens]
}

fn row_of(data: &Rows, index: usize) -> &[f32] {
    &data.logits[(data.first + index) * data.vocab..][..data.vocab]
}

/// Whether token `a` is more likely than `b`.
fn before(logits: &[f32], a: usize, b: usize) -> bool {
    logits[a] > logits[b] || logits[a] == logits[b] && a < b
}

/// The token of a row, or the code of why there is none.
fn choose(data: &Rows, index: usize) -> i32 {
    let (row, changes, mask) = data.batch.row(index);
    let mut logits = row_of(data, index).to_vec();
    for (token, x) in logits.iter_mut().enumerate() {
        let word = mask.get(token / 32).copied().unwrap_or(0);
        if !mask.is_empty() && word & 1 << (token % 32) == 0 {
            *x = f32::NEG_INFINITY;
        }
    }
    let last = row.pending_row.map(|last| data.previous[last as usize]);
    for (token, x) in logits.iter_mut().enumerate() {
        let listed = changes.iter().find(|c| c.token as usize == token);
        let (bias, recent, generated) =
            listed.map_or((0.0, false, 0), |c| (c.bias, c.recent, c.generated));
        let is_last = last == Some(token as i32);
        let (recent, generated) = (recent || is_last, generated + u32::from(is_last));
        *x += bias;
        if recent {
            *x = if *x > 0.0 {
                *x / row.repeat_penalty
            } else {
                *x * row.repeat_penalty
            };
        }
        if generated > 0 {
            *x -= row.presence_penalty + row.frequency_penalty * generated as f32;
        }
    }
    let numbers: Vec<usize> = (0..data.vocab).filter(|&i| !logits[i].is_nan()).collect();
    let possible = |&&i: &&usize| logits[i] > f32::NEG_INFINITY;
    let first = numbers.iter().filter(possible);
    let Some(&top) = first.min_by(|&&a, &&b| before(&logits, b, a).cmp(&before(&logits, a, b)))
    else {
        let nan = numbers.len() < data.vocab;
        return (if nan {
            NoToken::NotANumber
        } else {
            NoToken::Forbidden
        })
        .code();
    };
    if row.temperature == 0.0 {
        return top as i32;
    }
    drawn(&logits, &numbers, row, top) as i32
}

fn drawn(logits: &[f32], numbers: &[usize], row: &RowSampling, top: usize) -> usize {
    let weight = |i: usize| {
        let below = f64::from(logits[i] - logits[top]);
        if logits[i] == logits[top] {
            1.0
        } else {
            (below / f64::from(row.temperature)).exp()
        }
    };
    let better = |i: usize| {
        numbers
            .iter()
            .copied()
            .filter(move |&j| before(logits, j, i))
    };
    let by_k: Vec<usize> = numbers
        .iter()
        .copied()
        .filter(|&i| row.top_k == 0 || better(i).count() < row.top_k as usize)
        .collect();
    let mass: f64 = by_k.iter().map(|&i| weight(i)).sum();
    let in_p = |&i: &usize| {
        let above: f64 = better(i).map(weight).sum();
        row.top_p >= 1.0 || i == top || above < f64::from(row.top_p) * mass
    };
    let mut left: Vec<usize> = by_k.into_iter().filter(in_p).collect();
    left.retain(|&i| i == top || logits[i] == logits[top] || weight(i) >= f64::from(row.min_p));
    if row.draws_by_rank(logits.len()) {
        left.sort_by_key(|&i| better(i).count());
    }
    let all: f64 = left.iter().map(|&i| weight(i)).sum();
    let mut sum = 0.0;
    let passed = left.iter().find(|&&i| {
        sum += weight(i);
        sum > row.uniform * all
    });
    *passed.or(left.last()).unwrap_or(&top)
}

const WARM: RowSampling = RowSampling {
    temperature: 0.8,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repeat_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    uniform: 0.0,
    pending_row: None,
    logprobs: None,
};

/// Any settings.
fn any(rng: &mut Rng, vocab: usize) -> RowSampling {
    let penalty = |rng: &mut Rng, none: f32| match rng.below(2) {
        0 => none,
        _ => 1.3,
    };
    RowSampling {
        temperature: [0.0, 0.3, 0.8, 1.0, 4.0][rng.below(5)],
        top_k: [0, 0, 1, 5, 40, vocab as u32][rng.below(6)],
        top_p: [1.0, 1.0, 0.0, 0.3, 0.95][rng.below(5)],
        min_p: [0.0, 0.0, 0.05, 1.0][rng.below(4)],
        repeat_penalty: penalty(rng, 1.0),
        presence_penalty: penalty(rng, 0.0),
        frequency_penalty: penalty(rng, 0.0),
        ..WARM
    }
}

/// Every case of sampling.
pub(crate) fn cases<B: BackendSample>() -> Cases<B> {
    let mut cases = Cases::new();
    let act = act_name::<B>();
    let of = |name: String| label("sample_rows", act, Tolerance::EXACT, name);
    let settings: [(&str, RowSampling); 8] = [
        ("greedy", RowSampling::default()),
        ("temperature", WARM),
        ("top-k", RowSampling { top_k: 20, ..WARM }),
        ("top-p", RowSampling { top_p: 0.9, ..WARM }),
        ("min-p", RowSampling { min_p: 0.1, ..WARM }),
        ("top-p of 0", RowSampling { top_p: 0.0, ..WARM }),
        (
            "cold",
            RowSampling {
                temperature: 1e-3,
                ..WARM
            },
        ),
        (
            "all three",
            RowSampling {
                top_k: 50,
                top_p: 0.9,
                min_p: 0.02,
                ..WARM
            },
        ),
    ];
    for (name, row) in settings {
        // Of more than 1024 a thread of a block has several, and the last ones none.
        for vocab in [1, 31, 257, 1003, 2100] {
            let make = move |rng: &mut Rng| Rows::new(rng, (9, vocab), |_, _| row);
            let case = of(format!("{name}, 9 of {vocab}"));
            cases.add(case, make, implementations!(tokens, tokens_formula));
        }
    }
    for (rows, vocab, changes, masked) in [
        (0, 5, 0, false),
        (40, 300, 0, true),
        (40, 300, 60, false),
        (60, 333, 100, true),
        (4, 9001, 100, true),
    ] {
        let make = move |rng: &mut Rng| {
            let rows = Rows::new(rng, (rows, vocab), |rng, _| any(rng, vocab));
            rows.bent(rng, changes, masked)
        };
        let mask = if masked { "a mask" } else { "no mask" };
        let case = of(format!(
            "any settings, {rows} of {vocab}, {changes} changes, {mask}"
        ));
        cases.add(case, make, implementations!(tokens, tokens_formula));
    }
    more_cases(&mut cases, act);
    cases
}

fn more_cases<B: BackendSample>(cases: &mut Cases<B>, act: &'static str) {
    let of = |name: &str| label("sample_rows", act, Tolerance::EXACT, name);
    // The last token is known to the device only: in a list, in none, and one that there is not.
    let make = |rng: &mut Rng| {
        let (rows, vocab) = (30, 40);
        let settings = |rng: &mut Rng, index: usize| RowSampling {
            pending_row: Some(29 - index as u32),
            ..any(rng, vocab)
        };
        let mut data = Rows::new(rng, (rows, vocab), settings).bent(rng, 20, false);
        data.previous = rng.indices(rows, vocab);
        (data.previous[3], data.previous[4]) = (-1, vocab as i32);
        data
    };
    cases.add(
        of("a last token that the host does not know"),
        make,
        implementations!(tokens, tokens_formula),
    );
    // Many equals, on both sides of each cut; of 3000 more than devices list.
    for (rows, vocab) in [(60, 300), (15, 3000)] {
        let make = move |rng: &mut Rng| {
            let mut data = Rows::new(rng, (rows, vocab), |rng, _| any(rng, vocab));
            data.logits.iter_mut().for_each(|x| *x = x.round());
            data
        };
        let case = of(&format!("equals, {rows} of {vocab}"));
        cases.add(case, make, implementations!(tokens, tokens_formula));
    }
    // Fewer are possible than top-k asks for.
    let make = |rng: &mut Rng| {
        let mut data = Rows::new(rng, (12, 3000), |rng, _| any(rng, 3000));
        let mut batch = SampleBatch::default();
        for index in 0..data.batch.len() {
            let mask: Vec<u32> = (0..94).map(|word| u32::from(word % 16 == index)).collect();
            batch.push(*data.batch.row(index).0, [], Some(&mask));
        }
        data.batch = batch;
        data
    };
    cases.add(
        of("a mask of few of 3000"),
        make,
        implementations!(tokens, tokens_formula),
    );
    let make = |rng: &mut Rng| {
        let dim = 70;
        let mut data = Rows::new(rng, (12, dim), |_, index| RowSampling {
            logprobs: Some(4),
            ..match index % 2 {
                0 => WARM,
                _ => RowSampling {
                    top_k: 3,
                    top_p: 0.9,
                    min_p: 0.1,
                    ..WARM
                },
            }
        });
        for row in 0..2 {
            let mut set =
                |at: usize, x: f32| data.logits[(2 + row + at / dim * 2) * dim + at % dim] = x;
            (0..dim).for_each(|i| set(i, f32::NAN));
            (0..dim).for_each(|i| set(dim + i, f32::NEG_INFINITY));
            (0..dim).for_each(|i| set(2 * dim + i, if i == 41 { -1e4 } else { f32::NAN }));
            set(3 * dim + 64, f32::NAN);
            (0..dim - 1).for_each(|i| set(4 * dim + i, f32::NEG_INFINITY));
            set(5 * dim + 33, f32::INFINITY);
        }
        data
    };
    cases.add(
        of("NaN and infinities"),
        make,
        implementations!(tokens, tokens_formula),
    );
    let make = |rng: &mut Rng| {
        let settings = |rng: &mut Rng, _| RowSampling {
            logprobs: Some(MAX_LOGPROBS as u32),
            ..any(rng, 300)
        };
        Rows::new(rng, (10, 300), settings).bent(rng, 30, true)
    };
    let case = label(
        "sample_rows",
        act,
        Tolerance::ELEMENTWISE,
        "log-probabilities",
    );
    cases.add(
        case,
        make,
        implementations!(with_logprobs, logprobs_formula),
    );
    let make = |rng: &mut Rng| Rows::new(rng, (3, 7), |_, _| WARM);
    cases.rejects_short_buffers(("sample_rows", act), make, both!(tokens));
    cases.refuses(
        ("sample_rows", act, "settings out of range"),
        both!(refuses),
    );
}

fn refuses<B: BackendSample>(device: &B, refused: &mut Refusals) -> Check {
    let wrong_rows = [
        (
            "a negative temperature",
            RowSampling {
                temperature: -1.0,
                ..WARM
            },
        ),
        (
            "a temperature that is no number",
            RowSampling {
                temperature: f32::NAN,
                ..WARM
            },
        ),
        (
            "a top-p below 0",
            RowSampling {
                top_p: -0.1,
                ..WARM
            },
        ),
        ("a min-p above 1", RowSampling { min_p: 1.5, ..WARM }),
        (
            "a penalty of 0",
            RowSampling {
                repeat_penalty: 0.0,
                ..WARM
            },
        ),
        (
            "a row before the first",
            RowSampling {
                pending_row: Some(9),
                ..WARM
            },
        ),
        (
            "too many log-probabilities",
            RowSampling {
                logprobs: Some(BESIDE as u32),
                ..WARM
            },
        ),
    ];
    let mut refuse = |what: &str, data: &Rows| {
        let result = match tokens(&mut Io::new(device, Fault::None)?, data) {
            Err(CaseError::Error(error)) => Err(error),
            Err(wrong) => return Err(wrong),
            Ok(()) => Ok(()),
        };
        refused.expect(what, result)
    };
    let mut data = Rows::new(&mut Rng::new("refusals", |x| x), (1, 7), |_, _| WARM);
    for (what, row) in wrong_rows {
        data.batch.clear();
        data.batch.push(row, [], None);
        refuse(what, &data)?;
    }
    data.batch.clear();
    data.batch.push(WARM, [LogitAdjustment::none(7)], None);
    refuse("a change of a token that there is not", &data)
}
