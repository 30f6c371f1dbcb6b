//! Each sampler by a table, and their draws by chi-square against the exact distribution.

use super::*;
use proptest::prelude::*;

fn sampler(params: SamplingParams) -> Sampler {
    Sampler::new(params, 0, 0).unwrap()
}

/// Warm, and nothing else.
fn warm() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        seed: 7,
        ..Default::default()
    }
}

/// Logits of tokens with these probabilities.
fn of(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() as f32).collect()
}

/// How often each token is drawn.
fn counts(params: &SamplingParams, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = sampler(params.clone());
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(&mut logits.to_vec(), &[]).unwrap() as usize] += 1;
    }
    counts
}

/// Holds draws against expected probabilities: nothing where there is none, and a chi-square that one
/// in some ten thousand seeds would exceed.
fn assert_follows(params: &SamplingParams, logits: &[f32], expected: &[f64]) {
    const DRAWS: usize = 40_000;
    let found = counts(params, logits, DRAWS);
    let total: f64 = expected.iter().sum();
    let mut chi_square = 0.0;
    let mut kinds = 0.0;
    for (&count, p) in found.iter().zip(expected) {
        let mean = p / total * DRAWS as f64;
        if mean == 0.0 {
            assert_eq!(count, 0, "{params:?}: {found:?}, expected {expected:?}");
            continue;
        }
        chi_square += (count as f64 - mean).powi(2) / mean;
        kinds += 1.0;
    }
    let freedom: f64 = kinds - 1.0;
    // Wilson and Hilferty's approximation of the quantile at 3.7 standard deviations.
    let spread = 2.0 / (9.0 * freedom.max(1.0));
    let limit = freedom.max(1.0) * (1.0 - spread + 3.7 * spread.sqrt()).powi(3);
    assert!(
        chi_square < limit,
        "{params:?}: chi-square {chi_square} of {limit}, {found:?}, expected {expected:?}"
    );
}

#[test]
fn greedy_takes_the_lowest_of_equals_and_never_nan() {
    let mut sampler = sampler(SamplingParams::default());
    assert_eq!(sampler.sample(&mut [f32::NAN, 1.0, 3.0, 3.0], &[]), Ok(2));
}

#[test]
fn draws_follow_the_exact_distribution() {
    // 0.4 0.25 0.2 0.1 0.05, mixed up.
    let p = [0.1, 0.4, 0.05, 0.25, 0.2];
    let logits = of(&p);
    let hot = p.map(|p: f64| p.powf(1.0 / 1.5));
    let expected: Vec<(SamplingParams, [f64; 5])> = vec![
        (warm(), p),
        (
            SamplingParams {
                temperature: 1.5,
                ..warm()
            },
            hot,
        ),
        (
            SamplingParams { top_k: 3, ..warm() },
            [0.0, 0.4, 0.0, 0.25, 0.2],
        ),
        (
            SamplingParams {
                top_p: 0.6,
                ..warm()
            },
            [0.0, 0.4, 0.0, 0.25, 0.0],
        ),
        (
            SamplingParams {
                top_p: 0.7,
                ..warm()
            },
            [0.0, 0.4, 0.0, 0.25, 0.2],
        ),
        (
            SamplingParams {
                min_p: 0.3,
                ..warm()
            },
            [0.0, 0.4, 0.0, 0.25, 0.2],
        ),
        // After temperature, which makes 0.1 more than 0.3 of the best, and 0.85 of the three best less
        // than 0.8.
        (
            SamplingParams {
                min_p: 0.3,
                temperature: 1.5,
                ..warm()
            },
            [hot[0], hot[1], 0.0, hot[3], hot[4]],
        ),
        (
            SamplingParams {
                top_p: 0.8,
                temperature: 1.5,
                ..warm()
            },
            [hot[0], hot[1], 0.0, hot[3], hot[4]],
        ),
        // Typical of what top-p leaves: of 0.62 and 0.38 the first is nearer.
        (
            SamplingParams {
                top_p: 0.6,
                typical_p: 0.3,
                ..warm()
            },
            [0.0, 1.0, 0.0, 0.0, 0.0],
        ),
        // Of 0.4, 0.25 and 0.2, the first two together have 0.76.
        (
            SamplingParams {
                top_k: 3,
                top_p: 0.75,
                ..warm()
            },
            [0.0, 0.4, 0.0, 0.25, 0.0],
        ),
        // Expected surprise 1.415 nats: nearest are 0.25 (1.386), 0.2 (1.609), 0.4 (0.916).
        (
            SamplingParams {
                typical_p: 0.2,
                ..warm()
            },
            [0.0, 0.0, 0.0, 1.0, 0.0],
        ),
        (
            SamplingParams {
                typical_p: 0.4,
                ..warm()
            },
            [0.0, 0.0, 0.0, 0.25, 0.2],
        ),
        (
            SamplingParams {
                typical_p: 0.5,
                ..warm()
            },
            [0.0, 0.4, 0.0, 0.25, 0.2],
        ),
        (
            SamplingParams {
                xtc: Xtc {
                    probability: 1.0,
                    threshold: 0.15,
                },
                ..warm()
            },
            [0.1, 0.0, 0.05, 0.0, 0.2],
        ),
        (
            SamplingParams {
                xtc: Xtc {
                    probability: 1.0,
                    threshold: 0.3,
                },
                ..warm()
            },
            p,
        ),
        (
            SamplingParams {
                xtc: Xtc {
                    probability: 1.0,
                    threshold: 0.6,
                },
                ..warm()
            },
            p,
        ),
        // Half of the time all, half of the time without the two best.
        (
            SamplingParams {
                xtc: Xtc {
                    probability: 0.5,
                    threshold: 0.19,
                },
                ..warm()
            },
            {
                let without = 0.35;
                [0, 1, 2, 3, 4].map(|i| {
                    let rest = if i == 1 || i == 3 {
                        0.0
                    } else {
                        p[i] / without
                    };
                    0.5 * p[i] + 0.5 * rest
                })
            },
        ),
        (
            SamplingParams {
                logit_bias: vec![(0, 4f32.ln()), (1, f32::NEG_INFINITY)],
                ..warm()
            },
            [0.4, 0.0, 0.05, 0.25, 0.2],
        ),
    ];
    for (params, expected) in expected {
        assert_follows(&params, &logits, &expected);
    }
}

#[test]
fn filters_leave_at_least_the_best() {
    let logits = of(&[0.2, 0.5, 0.3]);
    let cases = [
        SamplingParams {
            top_p: 0.0,
            ..warm()
        },
        SamplingParams {
            min_p: 1.0,
            ..warm()
        },
        SamplingParams { top_k: 1, ..warm() },
        SamplingParams {
            temperature: 1e-30,
            ..warm()
        },
    ];
    for params in cases {
        assert_eq!(counts(&params, &logits, 50), [0, 50, 0], "{params:?}");
    }
    // Nothing but minus infinity, nothing but NaN, and nothing at all.
    let mut sampler = sampler(SamplingParams {
        top_k: 2,
        top_p: 0.5,
        typical_p: 0.5,
        ..warm()
    });
    let nothing = sampler.sample(&mut [f32::NEG_INFINITY; 3], &[]);
    assert_eq!(nothing, Err(NoToken::Forbidden));
    assert_eq!(sampler.sample(&mut [], &[]), Err(NoToken::Forbidden));
    // Infinity is certain.
    assert_eq!(sampler.sample(&mut [1.0, f32::INFINITY, 2.0], &[]), Ok(1));
}

#[test]
fn one_seed_one_sequence() {
    let run = |params: SamplingParams, choice| {
        let mut sampler = Sampler::new(params, 0, choice).unwrap();
        (0..32)
            .map(|_| sampler.sample(&mut [0.0; 50], &[]).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(run(warm(), 0), run(warm(), 0));
    assert_ne!(run(warm(), 0), run(warm(), 1), "choices differ");
    let other = SamplingParams { seed: 8, ..warm() };
    assert_ne!(run(warm(), 0), run(other, 0));
}

#[test]
fn penalties_by_table() {
    let none = SamplingParams::default;
    // Prompt 0 0 1 99, answer 2 2 3.
    let tokens = [0, 0, 1, 99, 2, 2, 3];
    let before = [4.0f32, -1.0, 1.5, 1.0, 3.0];
    let cases = [
        (
            "repetition counts the prompt, each token once",
            SamplingParams {
                repeat_penalty: 2.0,
                ..none()
            },
            [2.0, -2.0, 0.75, 0.5, 3.0],
        ),
        (
            "within its window",
            SamplingParams {
                repeat_penalty: 2.0,
                repeat_last_n: 2,
                ..none()
            },
            [4.0, -1.0, 0.75, 0.5, 3.0],
        ),
        (
            "presence counts the answer",
            SamplingParams {
                presence_penalty: 0.5,
                ..none()
            },
            [4.0, -1.0, 1.0, 0.5, 3.0],
        ),
        (
            "frequency counts each time",
            SamplingParams {
                frequency_penalty: 0.5,
                ..none()
            },
            [4.0, -1.0, 0.5, 0.5, 3.0],
        ),
        (
            "bias comes first",
            SamplingParams {
                logit_bias: vec![(1, 3.0), (700, 1.0)],
                repeat_penalty: 2.0,
                ..none()
            },
            [2.0, 1.0, 0.75, 0.5, 3.0],
        ),
    ];
    for (what, params, expected) in cases {
        let mut sampler = Sampler::new(params, 4, 0).unwrap();
        let mut logits = before;
        sampler.sample(&mut logits, &tokens).unwrap();
        assert_eq!(logits, expected, "{what}");
    }
}

proptest! {
    /// Counts that are updated from step to step equal counts from scratch, also when tokens are taken back.
    #[test]
    fn penalties_do_not_depend_on_the_steps_before(
        tokens in prop::collection::vec(0u32..6, 1..40),
        lens in prop::collection::vec(1usize..40, 1..12),
        window in 1usize..12,
    ) {
        let params = SamplingParams {
            repeat_penalty: 1.5,
            repeat_last_n: window,
            frequency_penalty: 0.25,
            ..Default::default()
        };
        let mut warm = Sampler::new(params.clone(), 2, 0).unwrap();
        for len in lens {
            let tokens = &tokens[..len.min(tokens.len())];
            let (mut a, mut b) = ([1.0f32; 6], [1.0f32; 6]);
            warm.sample(&mut a, tokens).unwrap();
            Sampler::new(params.clone(), 2, 0).unwrap().sample(&mut b, tokens).unwrap();
            prop_assert_eq!(a, b);
        }
    }
}

#[test]
fn a_row_without_a_number_gives_no_token() {
    let cases = [
        SamplingParams::default(),
        warm(),
        SamplingParams {
            top_p: 0.5,
            ..warm()
        },
        SamplingParams { top_k: 2, ..warm() },
        SamplingParams {
            mirostat: Some(Mirostat::default()),
            ..warm()
        },
    ];
    for params in cases {
        let found = sampler(params.clone()).sample(&mut [f32::NAN; 3], &[]);
        assert_eq!(found, Err(NoToken::NotANumber), "{params:?}");
        // One that is left will do.
        let found = sampler(params.clone()).sample(&mut [f32::NAN, f32::NAN, 1.0], &[]);
        assert_eq!(found, Ok(2), "{params:?}");
        // Of those that may be chosen, none is a number.
        let mut params = params;
        params.allowed_tokens = Some([0, 1].into());
        let found = sampler(params.clone()).sample(&mut [f32::NAN, f32::NAN, 1.0], &[]);
        assert_eq!(found, Err(NoToken::NotANumber), "{params:?}");
    }
}

#[test]
fn bans_by_table() {
    let none = SamplingParams::default;
    // Prompt 0 1, answer 2 3.
    let tokens = [0, 1, 2, 3];
    let bad = |words: &[&[TokenId]]| SamplingParams {
        bad_words: words.iter().map(|word| word.to_vec()).collect(),
        ..none()
    };
    let allowed = |tokens: &[TokenId]| SamplingParams {
        allowed_tokens: Some(tokens.into()),
        ..none()
    };
    // The tokens that stay possible of 0 to 4, of which 4 ends an answer of at least `least` tokens.
    let cases = [
        ("nothing", none(), 0, "01234"),
        ("a word of one token", bad(&[&[1]]), 0, "0234"),
        ("the end of a word", bad(&[&[2, 3, 1], &[3, 0]]), 0, "234"),
        ("another beginning", bad(&[&[3, 2, 1], &[2, 0]]), 0, "01234"),
        (
            "the prompt is not the answer's",
            bad(&[&[1, 2, 3, 0]]),
            0,
            "01234",
        ),
        ("longer than the answer", bad(&[&[9; 64]]), 0, "01234"),
        ("outside the row", bad(&[&[77]]), 0, "01234"),
        ("a list", allowed(&[3, 0, 3, 77]), 0, "03"),
        ("long enough", none(), 2, "01234"),
        ("too short", none(), 3, "0123"),
        (
            "bias does not lift a ban",
            SamplingParams {
                logit_bias: vec![(1, 100.0), (4, 100.0)],
                ..bad(&[&[1]])
            },
            3,
            "023",
        ),
    ];
    for (what, params, least, expected) in cases {
        let sampler = Sampler::new(params, 2, 0).unwrap();
        let mut sampler = sampler.with_min_tokens(least, &[4, 99]);
        let mut logits = [0.5, 0.25, 1.0, 0.75, 2.0];
        sampler.sample(&mut logits, &tokens).unwrap();
        let left = (0..5).filter(|&i| logits[i] > f32::NEG_INFINITY);
        let left: String = left.map(|i| i.to_string()).collect();
        assert_eq!(left, expected, "{what}");
    }
    let mut nothing_left = Sampler::new(allowed(&[4]), 2, 0)
        .unwrap()
        .with_min_tokens(3, &[4]);
    let found = nothing_left.sample(&mut [0.0; 5], &tokens);
    assert_eq!(found, Err(NoToken::Forbidden));
}

/// Breakers of a vocabulary whose tokens are the digits of their numbers.
fn breakers(texts: &[&str]) -> DryBreakers {
    let digits = (0..10).map(|i: TokenId| (i, i.to_string().into_bytes()));
    DryBreakers::of_tokens(digits, texts)
}

#[test]
fn dry_by_table() {
    let dry = Dry {
        multiplier: 1.0,
        base: 2.0,
        allowed_length: 2,
        ..Dry::default()
    };
    // The last n tokens went on with 4 before, where n were the same.
    let cases: &[(&str, Dry, &[TokenId], f32)] = &[
        (
            "1 2 3 is repeated: 2 to the power of 1",
            dry.clone(),
            &[1, 2, 3, 4, 1, 2, 3],
            2.0,
        ),
        ("2 3 is repeated", dry.clone(), &[1, 2, 3, 4, 0, 2, 3], 1.0),
        (
            "3 alone is allowed",
            dry.clone(),
            &[1, 2, 3, 4, 1, 0, 3],
            0.0,
        ),
        (
            "the longest counts",
            dry.clone(),
            &[0, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3],
            16.0,
        ),
        (
            "not over a breaker",
            Dry {
                breakers: breakers(&["2"]),
                ..dry.clone()
            },
            &[1, 2, 3, 4, 1, 2, 3],
            0.0,
        ),
        (
            "a breaker shortens",
            Dry {
                breakers: breakers(&["9", "1"]),
                ..dry.clone()
            },
            &[1, 2, 3, 4, 1, 2, 3],
            1.0,
        ),
        (
            "a breaker of two tokens",
            Dry {
                breakers: breakers(&["12"]),
                ..dry.clone()
            },
            &[1, 2, 3, 4, 1, 2, 3],
            0.0,
        ),
        (
            "not before the window",
            Dry {
                last_n: 6,
                ..dry.clone()
            },
            &[1, 2, 3, 4, 1, 2, 3],
            1.0,
        ),
        ("off", Dry::default(), &[1, 2, 3, 4, 1, 2, 3], 0.0),
        ("nothing there", dry.clone(), &[], 0.0),
    ];
    for (what, dry, tokens, penalty) in cases {
        let params = SamplingParams {
            dry: dry.clone(),
            ..Default::default()
        };
        let mut logits = [0.0; 6];
        sampler(params).sample(&mut logits, tokens).unwrap();
        assert_eq!(logits, [0.0, 0.0, 0.0, 0.0, -penalty, 0.0], "{what}");
    }
    // However long the repetition, the penalty is a number.
    let params = SamplingParams {
        dry,
        ..Default::default()
    };
    let mut logits = [0.0; 6];
    sampler(params).sample(&mut logits, &[4; 4000]).unwrap();
    assert!(logits[4] < -1e30 && logits[4].is_finite(), "{logits:?}");
}

#[test]
fn mirostat_keeps_surprise_near_its_aim() {
    // A long tail, as of language.
    let logits: Vec<f32> = (1..2000).map(|i| -1.1 * (i as f32).ln()).collect();
    let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    let mean_surprise = |params: SamplingParams| {
        let draws = counts(&params, &logits, 20_000);
        let surprise = |i: usize| -(f64::from(logits[i]).exp() / total).log2();
        draws
            .iter()
            .enumerate()
            .map(|(i, &n)| n as f64 * surprise(i))
            .sum::<f64>()
            / 20_000.0
    };
    let aim = |tau| SamplingParams {
        mirostat: Some(Mirostat { tau, eta: 0.1 }),
        ..warm()
    };
    let (low, high) = (mean_surprise(aim(2.0)), mean_surprise(aim(5.0)));
    assert!(low < high && high < mean_surprise(warm()), "{low} {high}");
    // What it steers is the surprise among what it left.
    let mut sampler = sampler(aim(3.0));
    let mut sum = 0.0;
    for _ in 0..4000 {
        let before = sampler.mu;
        sampler.sample(&mut logits.clone(), &[]).unwrap();
        sum += 3.0 - (sampler.mu - before) / f64::from(0.1f32);
    }
    assert!((sum / 4000.0 - 3.0).abs() < 0.1, "{}", sum / 4000.0);
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let logits = of(&[0.1, 0.4, 0.05, 0.25, 0.2]);
    let found = logprobs(&logits, 4, 2);
    assert_eq!(found.rank, 3);
    let near = |found: TokenLogprob, token, p: f64| {
        assert_eq!(found.token, token);
        assert!(
            (f64::from(found.logprob) - p.ln()).abs() < 1e-6,
            "{found:?}"
        );
    };
    near(found.chosen, 4, 0.2);
    near(found.top[0], 1, 0.4);
    near(found.top[1], 3, 0.25);
    assert_eq!(found.top.len(), 2);
    // Equals go by id; NaN and what is outside have no chance; one certainty is one.
    let odd = [1.0, f32::NAN, 1.0, f32::NEG_INFINITY];
    let found = logprobs(&odd, 2, 9);
    assert_eq!(found.rank, 2);
    let tokens: Vec<_> = found.top.iter().map(|t| t.token).collect();
    assert_eq!(tokens, [0, 2, 3]);
    assert!((found.chosen.logprob + 2f32.ln()).abs() < 1e-6);
    assert_eq!(logprobs(&odd, 77, 0).chosen.logprob, f32::NEG_INFINITY);
    let certain = logprobs(&[0.0, f32::INFINITY], 1, 1);
    assert_eq!((certain.chosen.logprob, certain.rank), (0.0, 1));
}

#[test]
fn settings_out_of_range_are_named() {
    let base = SamplingParams::default;
    let xtc = Xtc {
        probability: 2.0,
        threshold: 0.1,
    };
    let dry = Dry {
        base: 0.5,
        ..Dry::default()
    };
    let cases = [
        (
            SamplingParams {
                top_p: 1.5,
                ..base()
            },
            "top-p: found 1.5, expected 0 to 1",
        ),
        (
            SamplingParams {
                temperature: f32::NAN,
                ..base()
            },
            "temperature: found NaN",
        ),
        (
            SamplingParams {
                repeat_penalty: 0.0,
                ..base()
            },
            "expected a number above 0",
        ),
        (
            SamplingParams {
                presence_penalty: f32::INFINITY,
                ..base()
            },
            "presence-penalty: found inf",
        ),
        (SamplingParams { xtc, ..base() }, "xtc-probability: found 2"),
        (
            SamplingParams { dry, ..base() },
            "dry-base: found 0.5, expected a number of at least 1",
        ),
        (
            SamplingParams {
                logit_bias: vec![(1, f32::NAN)],
                ..base()
            },
            "logit-bias: found NaN",
        ),
        (
            SamplingParams {
                logit_bias: vec![(1, 0.0); 1025],
                ..base()
            },
            "found 1025 entries",
        ),
        (
            SamplingParams {
                mirostat: Some(Mirostat {
                    tau: -1.0,
                    eta: 0.1,
                }),
                ..base()
            },
            "mirostat-tau: found -1",
        ),
    ];
    for (params, words) in cases {
        let error = params.validate().unwrap_err().to_string();
        assert!(error.contains(words), "{error}, expected {words}");
    }
    let lists = [
        (vec![vec![1]; 1025], None, "bad-words: found 1025"),
        (vec![vec![1; 65]], None, "a sequence of 65 tokens"),
        (vec![vec![]], None, "a sequence of 0 tokens"),
        (vec![], Some([].into()), "allowed-tokens: found none"),
    ];
    for (bad_words, allowed_tokens, words) in lists {
        let params = SamplingParams {
            bad_words,
            allowed_tokens,
            ..base()
        };
        let error = params.validate().unwrap_err().to_string();
        assert!(error.contains(words), "{error}, expected {words}");
    }
    let ban = SamplingParams {
        logit_bias: vec![(1, f32::NEG_INFINITY)],
        ..base()
    };
    ban.validate().unwrap();
}
