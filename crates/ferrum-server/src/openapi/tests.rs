use super::*;
use crate::config::ServerConfig;
use crate::models::demo;
use crate::routes;

fn described() -> Value {
    let app = App::new(
        vec!["demo".into()],
        Arc::new(|_: &str| Ok(demo())),
        ServerConfig::default(),
        None,
    );
    document(&app)
}

#[test]
fn every_route_is_described() {
    let document = described();
    for (path, _) in routes::table() {
        let path = path.replace("{*name}", "{name}");
        // Those without a version are the same as those with it.
        let versioned = format!("/v1{path}");
        let known = [&path, &versioned].map(|path| document["paths"].get(path));
        assert!(known.iter().any(Option::is_some), "{path}");
    }
}

#[test]
fn a_name_has_one_schema() {
    let mut components = Components::default();
    operations::all(&mut components);
    let mut known = Map::new();
    for (name, schema) in components.named() {
        let before = known.entry(&*name).or_insert_with(|| schema.clone());
        assert_eq!(*before, schema, "{name}");
    }
}

#[test]
fn what_is_streamed_is_described_as_what_comes_whole() {
    let document = described();
    for (path, item) in document["paths"].as_object().unwrap() {
        let request = &item["post"]["requestBody"]["content"]["application/json"]["schema"];
        let mut asked = Vec::new();
        references(request, &mut asked);
        let can_stream = asked.contains(&"#/components/schemas/Sampling");
        let content = &item["post"]["responses"]["200"]["content"];
        let counts = path.ends_with("input_tokens");
        assert_eq!(
            content.get("text/event-stream").is_some(),
            can_stream && !counts,
            "{path}"
        );
    }
}

/// Whether a value has an object of which only words are said beside something else that it has to be.
fn is_described_inline(value: &Value) -> bool {
    let nothing = |part: &Value| part["type"] == "object" && part.get("properties").is_none();
    let parts = value["allOf"].as_array().into_iter().flatten();
    parts.clone().any(nothing)
        || value
            .as_object()
            .into_iter()
            .flatten()
            .any(|(_, v)| is_described_inline(v))
        || value
            .as_array()
            .into_iter()
            .flatten()
            .any(is_described_inline)
}

#[test]
fn what_is_inline_is_what_its_type_says() {
    assert!(!is_described_inline(&described()["components"]["schemas"]));
}

/// All references of a value.
fn references<'a>(value: &'a Value, out: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            out.extend(map.get("$ref").and_then(Value::as_str));
            map.values().for_each(|value| references(value, out));
        }
        Value::Array(list) => list.iter().for_each(|value| references(value, out)),
        _ => {}
    }
}

#[test]
fn what_is_referred_to_is_there() {
    let document = described();
    let mut all = Vec::new();
    references(&document, &mut all);
    assert!(all.len() > 50);
    for reference in all {
        let name = reference.strip_prefix("#/components/schemas/").unwrap();
        assert!(
            document["components"]["schemas"].get(name).is_some(),
            "{name}"
        );
    }
}

#[test]
fn fields_have_the_bounds_that_they_are_read_with() {
    let schemas = &described()["components"]["schemas"];
    let sampling = &schemas["Sampling"]["properties"];
    let temperature = sampling["temperature"].to_string();
    assert!(temperature.contains("Number.0.2"), "{temperature}");
    assert_eq!(schemas["Number.0.2"]["maximum"], 2);
    assert!(sampling.get("use_beam_search").is_some());
    assert!(schemas["Message"]["properties"].get("tool_calls").is_some());
    assert_eq!(schemas["Message"]["required"], json!(["role"]));
}
