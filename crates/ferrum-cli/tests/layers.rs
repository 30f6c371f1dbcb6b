//! `--layers`: a model on several devices says what it says on one, and lists that cannot be are said.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{ferrum, json, ok, stderr, stdout};
use ferrum_test_support::skip;

#[test]
fn layers_on_several_devices_give_the_same_text() {
    let layers = json(&["inspect", "--json"])["spec"]["layers"]
        .as_u64()
        .unwrap();
    let last = layers - 1;
    let run = |device: &[&str]| {
        let args = ["run", "--kv-dtype", "f32", "--temperature", "0", "-n", "24"];
        let prompt = ["Tell me a story about a bear."];
        ferrum(&[&args[..], device, &prompt].concat())
    };
    let cpu = run(&["--backend", "cpu"]);
    assert!(cpu.status.success(), "{}", stderr(&cpu));
    for devices in [
        "cpu:0,cpu:1",
        "cpu:0,reference:1",
        "vulkan:0,cpu:1",
        "cpu:0,vulkan:1",
    ] {
        let list = format!("{devices}-{last}");
        let found = run(&["--layers", &list, "--verbose"]);
        if stderr(&found).contains("error: no vulkan device") {
            skip("no Vulkan device");
            continue;
        }
        assert_eq!(stdout(&found), stdout(&cpu), "{list}: {}", stderr(&found));
        let note = "note: the layers are on ";
        assert!(stderr(&found).contains(note), "{list}: {}", stderr(&found));
    }
    let list = format!("cpu:0,reference:1-{last}");
    let plan = json(&["inspect", "--json", "--layers", &list]);
    let stages = plan["memory_plan"]["stages"].as_array().unwrap().clone();
    let sum = |key: &str| stages.iter().map(|s| s[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(stages.len(), 2);
    assert_eq!(stages[1]["backend"], "reference");
    assert_eq!(
        (&stages[1]["first_layer"], &stages[1]["last_layer"]),
        (&1.into(), &last.into())
    );
    for key in ["weights_bytes", "kv_bytes", "scratch_bytes"] {
        assert_eq!(plan["memory_plan"][key], sum(key), "{key}");
    }
    let text = ok(&["inspect", "--layers", &list]);
    assert!(text.contains("  cpu 0        layers 0: weights "), "{text}");
    assert!(
        text.contains(&format!("  reference 0  layers 1-{last}: weights ")),
        "{text}"
    );
    assert!(!ok(&["inspect"]).contains("on each device"));
    let bench = [
        "bench", "--layers", &list, "--prompt", "4", "--gen", "2", "--repeat", "1", "--json",
    ];
    assert_eq!(json(&bench)["layers"], list.as_str());
    let bench = ok(&bench[..bench.len() - 1]);
    assert!(bench.contains(&format!("layers 1-{last}")), "{bench}");
}

#[test]
fn layers_that_cannot_be_placed_are_said() {
    for (layers, status, expected) in [
        (
            "cpu:0-1,gpu:3-4",
            2,
            "layers 2 to 2 come before gpu:3-4 and are in no stage",
        ),
        (
            "cpu:0-1,gpu:1-4",
            2,
            "layers 1 to 1 of gpu:1-4 are in the stage before it",
        ),
        (
            "tpu:0-1",
            2,
            "unknown backend \"tpu\", expected one of: auto, cpu",
        ),
        ("cpu", 2, "expected BACKEND:FIRST-LAST, such as cpu:0-13"),
        ("cpu:0-999", 1, "found cpu:0-999, and the model has"),
        ("cpu:0", 1, "are in no stage of cpu:0-0, and the model has"),
        ("cuda:0-1,cpu:2-999", 1, "and the model has"),
    ] {
        for command in [
            &["run", "hi"][..],
            &["bench"],
            &["logits", "--tokens", "1"],
            &["inspect"],
        ] {
            let output = ferrum(&[&command[..1], &["--layers", layers], &command[1..]].concat());
            let error = stderr(&output);
            assert_eq!(output.status.code(), Some(status), "{command:?}: {error}");
            assert!(error.contains(expected), "{command:?} {layers}: {error}");
        }
    }
    for (flags, status, expected) in [
        (
            &["--gpu-layers", "half"][..],
            2,
            "expected a number of layers, \"auto\" or \"all\"",
        ),
        (
            &["--gpu-layers", "2", "--backend", "cpu"],
            1,
            "which is no GPU",
        ),
        (
            &["--gpu-layers", "2", "--backend", "cuda", "--device", "99"],
            1,
            "no cuda device",
        ),
        (&["--activations", "f32"], 2, "unknown activations \"f32\""),
        (
            &["--activations", "f16", "--backend", "cpu"],
            1,
            "found --activations f16 with the backend cpu, which has no choice of them",
        ),
        (
            &["--activations", "bf16", "--gpu-layers", "0"],
            1,
            "with the backend cpu",
        ),
        (
            &["--activations", "f16", "--layers", "cpu:0-3"],
            1,
            "with the backend cpu",
        ),
        (
            &["--gpu-layers", "2", "--layers", "cpu:0-3"],
            2,
            "cannot be used with",
        ),
        (
            &["--gpu-layers", "2", "--tensor-parallel", "2"],
            2,
            "cannot be used with",
        ),
    ] {
        let output = ferrum(&[&["run"], flags, &["hi"]].concat());
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(status), "{flags:?}: {error}");
        assert!(error.contains(expected), "{flags:?}: {error}");
    }
    for other in [["--backend", "cpu"], ["--device", "0"]] {
        let output = ferrum(&[&["run", "--layers", "cpu:0-3"], &other[..], &["hi"]].concat());
        assert_eq!(output.status.code(), Some(2));
        assert!(
            stderr(&output).contains("cannot be used with"),
            "{}",
            stderr(&output)
        );
    }
}
