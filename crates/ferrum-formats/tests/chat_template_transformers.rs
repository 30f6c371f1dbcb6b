//! Rendered prompts against what transformers renders, to the byte.

#![allow(clippy::unwrap_used)]

use ferrum_formats::chat_template::{ChatInput, ChatTemplate, TemplateError};
use ferrum_test_support::skip;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Cases where we differ from transformers, and what is found instead; `docs/formats.md` says why.
const DIFFERENCES: [(&str, &str); 1] = [(
    "snippet/macro-varargs",
    "chat template, line 1: too many arguments",
)];

/// 2024-07-06 09:05:03, the time that the expectations were made at.
fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_720_256_703)
}

fn render(case: &Value) -> Result<String, TemplateError> {
    let specials = ["bos_token", "eos_token"]
        .into_iter()
        .filter_map(|name| Some((name, case[name].as_str()?)));
    let template = ChatTemplate::from_source(case["template"].as_str().unwrap(), specials)?;
    template.render(&ChatInput {
        tools: Some(&case["tools"]).filter(|tools| !tools.is_null()),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        extra: case["variables"].as_object().unwrap().clone(),
        now: Some(now()),
        ..ChatInput::new(&case["messages"])
    })
}

fn check(cases: &Value) {
    assert_eq!(cases["now"], "2024-07-06T09:05:03");
    let cases = cases["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    let mut failures = Vec::new();
    for case in cases {
        let result = render(case);
        let error = &case["error"];
        let difference = DIFFERENCES.iter().find(|(name, _)| case["name"] == *name);
        let good = match (&result, case["expected"].as_str()) {
            (result, _) if let Some((_, expected)) = difference => {
                result.as_ref().err().map(ToString::to_string).as_deref() == Some(*expected)
            }
            (Ok(found), Some(expected)) => found == expected,
            (Err(TemplateError::Refused(message)), None) => {
                case["raised_by_template"] == true && error == message.as_str()
            }
            (Err(_), None) => case["raised_by_template"] == false,
            _ => false,
        };
        if !good {
            let expected = if error.is_null() {
                &case["expected"]
            } else {
                error
            };
            failures.push(format!(
                "{}\n  found    {result:?}\n  expected {expected:?}",
                case["name"]
            ));
        }
    }
    let count = failures.len();
    assert!(
        failures.is_empty(),
        "{count} of {} differ\n{}",
        cases.len(),
        failures.join("\n")
    );
}

#[test]
fn recorded_cases() {
    let path = root().join("fixtures/templates/cases.json");
    check(&serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap());
}

/// Templates of real models lie beside the project; transformers says what they render.
#[test]
fn templates_of_real_models() {
    let dir = root().join("../shared/templates");
    let probe = Command::new("python3")
        .args(["-c", "import transformers"])
        .output();
    if !dir.exists() || !probe.is_ok_and(|output| output.status.success()) {
        skip(format_args!(
            "needs {} and python3 with transformers",
            dir.display()
        ));
        return;
    }
    let script: &Path = &root().join("tools/fixtures/make_templates.py");
    let output = Command::new("python3")
        .arg(script)
        .arg("--shared")
        .arg(&dir)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    check(&serde_json::from_slice(&output.stdout).unwrap());
}
