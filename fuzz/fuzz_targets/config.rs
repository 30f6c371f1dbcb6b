//! Hugging Face JSON: every reader of a config, on any object.
#![no_main]

use ferrum_formats::hf::{GenerationConfig, HfConfig, QuantizationConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(config) = HfConfig::from_slice("config.json", data) else {
        return;
    };
    let _ = (config.architectures().is_ok(), config.model_type().is_ok());
    let _ = (
        config.rope(10_000.0),
        config.text_config().map(|text| text.rope(10_000.0)),
    );
    let _ = QuantizationConfig::of_model(&config);
    let _ = QuantizationConfig::from_json(&config);
    let _ = GenerationConfig::from_json(&config);
    let _ = GenerationConfig::default().completed_from(&config);
    for key in config.keys() {
        let _ = (
            config.usize(key),
            config.f64(key),
            config.bool(key),
            config.str(key),
        );
        let _ = (
            config.usizes(key),
            config.f64s(key),
            config.strs(key),
            config.token_ids(key),
        );
        let _ = (config.require_usize(key), config.section(key));
    }
});
