//! Text of tokens, and where it stops.

use crate::scripted::{CONFIG, Scripted};
use crate::{collect, demo_tokenizer, encode, greedy};
use ferrum_engine::engine::StopMatch;
use ferrum_engine::{EngineConfig, FinishReason, Request};

/// The text that is answered when the model says `said`, and why it ended.
fn answer(said: &str, change: impl Fn(&mut Request)) -> (String, FinishReason, Option<StopMatch>) {
    let tokens = encode(said);
    let mut request = greedy(&[1, 2], tokens.len());
    change(&mut request);
    let engine = Scripted::new(CONFIG)
        .saying(2, tokens)
        .start(EngineConfig::default());
    let answered = collect(engine.handle().submit(request).unwrap());
    let choice = answered.choices[0].clone();
    let (reason, stop) = choice.ended.unwrap();
    (choice.text, reason, stop)
}

fn stops(stops: &'static [&'static str]) -> impl Fn(&mut Request) {
    move |request| request.generation.stop = stops.iter().map(|&s| s.into()).collect()
}

#[test]
fn stop_strings_are_met_wherever_tokens_and_characters_end() {
    // Characters that the demo vocabulary writes in several byte tokens, and words of several tokens.
    let said = "the fox said \u{1f98a}\u{1f407} hello hello END of it";
    assert!(encode(said).len() > encode("the fox said hello hello END of it").len() + 4);
    let cases: &[(&'static [&'static str], &str, Option<&str>)] = &[
        (&[], said, None),
        (&["nothing of it"], said, None),
        (&["\u{1f407}"], "the fox said \u{1f98a}", Some("\u{1f407}")),
        (
            &["\u{1f98a}\u{1f407} h"],
            "the fox said ",
            Some("\u{1f98a}\u{1f407} h"),
        ),
        (
            &["END", "hello hello"],
            "the fox said \u{1f98a}\u{1f407} ",
            Some("hello hello"),
        ),
        (&["x said", "fox", "e fox"], "th", Some("e fox")),
        (
            &["hello END"],
            "the fox said \u{1f98a}\u{1f407} hello ",
            Some("hello END"),
        ),
        // What begins like a stop at the very end is part of the text.
        (&["of it!"], said, None),
    ];
    for &(list, text, met) in cases {
        let (found, reason, stop) = answer(said, stops(list));
        assert_eq!(found.trim_start(), text, "{list:?}");
        assert_eq!(stop, met.map(|m| StopMatch::Text(m.into())), "{list:?}");
        let expected = match met {
            Some(_) => FinishReason::Stop,
            None => FinishReason::Length,
        };
        assert_eq!(reason, expected, "{list:?}");
    }
}

#[test]
fn a_stop_token_is_not_part_of_the_answer() {
    let tokens = encode("one two three");
    let last = *tokens.last().unwrap();
    let (text, reason, stop) = answer("one two three", |r| r.generation.stop_tokens = vec![last]);
    let before = demo_tokenizer().decode(&tokens[..tokens.len() - 1], true);
    assert_eq!(text, before);
    assert_eq!(reason, FinishReason::Stop);
    assert_eq!(stop, Some(StopMatch::Token(last)));
}

#[test]
fn half_a_character_at_the_end_is_marked() {
    let whole = encode("\u{1f98a}");
    assert!(whole.len() > 1);
    let engine = Scripted::new(CONFIG)
        .saying(1, whole.clone())
        .start(EngineConfig::default());
    let half = collect(
        engine
            .handle()
            .submit(greedy(&[1], whole.len() - 1))
            .unwrap(),
    );
    assert!(half.choices[0].text.contains('\u{fffd}'), "{half:?}");
}
