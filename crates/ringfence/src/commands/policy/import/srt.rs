//! Settings of sandbox-runtime: `network.allowedDomains` and `network.deniedDomains`.
//!
//! An entry is `NAME`, `*.NAME`, an address, or one of these with `:PORT`; without a port it stands for all. Entries that deny may
//! be `*`. Claude Code has the same object in `sandbox.network` of its settings.

use anyhow::{Context, bail};
use ringfence_policy::Action;
use serde_json::Value;

use super::Imported;

/// Rules for all addresses.
const EVERYWHERE: [&str; 2] = ["0.0.0.0/0", "[::]/0"];

/// Parts of the settings with an equivalent elsewhere.
const ELSEWHERE: [(&str, &str); 5] = [
    ("allowLocalBinding", "a guest may listen at ports of its own in any case"),
    ("strictAllowlist", "unknown names are denied, or asked about with `run --ask`"),
    ("allowUnixSockets", "`run` hides the host's Unix sockets; see docs/run.md"),
    ("allowAllUnixSockets", "`run` hides the host's Unix sockets; see docs/run.md"),
    ("deniedDomainReasons", "`policy why` names the rule that denies"),
];

/// Converts the settings.
///
/// # Errors
///
/// Returns the reason for which the text is no settings file.
pub(super) fn convert(text: &str) -> anyhow::Result<Imported> {
    let settings: Value = serde_json::from_str(text).context("this is no JSON")?;
    let network = settings.get("network").or_else(|| settings.get("sandbox")?.get("network"));
    let Some(Value::Object(network)) = network else {
        bail!(
            "there is no object `network`: name a settings file of sandbox-runtime, such as ~/.srt-settings.json, or say \
             `--from cilium`"
        );
    };
    let mut imported = Imported::default();
    for (action, key) in [(Action::Allow, "allowedDomains"), (Action::Deny, "deniedDomains")] {
        for entry in entries(network.get(key), key)? {
            add(&mut imported, action, key, entry);
        }
    }
    for (key, value) in network {
        let is_converted = ["allowedDomains", "deniedDomains"].contains(&key.as_str());
        let is_set = match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(list) => !list.is_empty(),
            Value::Object(object) => !object.is_empty(),
            _ => true,
        };
        if !is_converted && is_set {
            let elsewhere = ELSEWHERE.iter().find(|(name, _)| name == key);
            let why = elsewhere.map_or("a policy has no such setting", |(_, why)| why);
            imported.remark(&format!("network.{key}"), why);
        }
    }
    Ok(imported)
}

/// Returns the entries of a list, which may be missing.
fn entries<'a>(list: Option<&'a Value>, key: &str) -> anyhow::Result<Vec<&'a str>> {
    let Some(list) = list else { return Ok(Vec::new()) };
    let entries = list.as_array().with_context(|| format!("network.{key} is no list"))?;
    let text = |entry: &'a Value| {
        entry.as_str().with_context(|| format!("network.{key}: {entry} is no text"))
    };
    entries.iter().map(text).collect()
}

fn add(imported: &mut Imported, action: Action, key: &str, entry: &str) {
    let place = format!("network.{key}: {entry}");
    let (host, port) = match entry.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, Some(port)),
        _ => (entry, None),
    };
    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
    match (action, host) {
        (Action::Deny, "*") => {
            EVERYWHERE.iter().for_each(|all| imported.add(action, &place, &format!("{all}{port}")));
        }
        (Action::Allow, "localhost") => {
            imported.remark(&place, "the host's loopback is an option of `run`: --host-loopback");
        }
        // The proxy of sandbox-runtime carries TCP alone.
        (Action::Allow, _) => imported.add(action, &place, &format!("{entry}/tcp")),
        (Action::Deny, _) => imported.add(action, &place, entry),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_become_rules_and_other_settings_remarks() {
        let text = r#"{
            "network": {
                "allowedDomains": ["github.com", "*.npmjs.org:8443", "localhost", "10.0.0.7", "[2001:db8::1]:443", "a b"],
                "deniedDomains": ["gist.github.com", "*:22"],
                "allowLocalBinding": true, "allowUnixSockets": [], "tlsTerminate": {"caCertPath": "x"}
            },
            "filesystem": {"denyRead": ["~/.ssh"]}
        }"#;
        let imported = convert(text).unwrap();
        let allow =
            ["github.com/tcp", "*.npmjs.org:8443/tcp", "10.0.0.7/tcp", "[2001:db8::1]:443/tcp"];
        assert_eq!(imported.allow, allow);
        assert_eq!(imported.deny, ["gist.github.com", "0.0.0.0/0:22", "[::]/0:22"]);
        let remarks = imported.remarks.join("\n");
        for part in
            ["localhost: ", "a b: ", "network.allowLocalBinding: ", "network.tlsTerminate: "]
        {
            assert!(remarks.contains(part), "{part}: {remarks}");
        }
        assert_eq!(imported.remarks.len(), 4, "{remarks}");
    }

    #[test]
    fn settings_of_claude_code_have_the_object_below_sandbox() {
        let text = r#"{"sandbox": {"network": {"allowedDomains": ["a.org:443"]}}}"#;
        assert_eq!(convert(text).unwrap().allow, ["a.org:443/tcp"]);
    }

    #[test]
    fn text_that_is_no_settings_file_is_refused_with_advice() {
        for (text, advice) in [
            ("{", "no JSON"),
            ("{}", ".srt-settings.json"),
            (r#"{"network": []}"#, "no object `network`"),
            (r#"{"network": {"allowedDomains": "a.org"}}"#, "allowedDomains is no list"),
            (r#"{"network": {"deniedDomains": [1]}}"#, "1 is no text"),
        ] {
            let error = format!("{:#}", convert(text).unwrap_err());
            assert!(error.contains(advice), "{text}: {error}");
        }
    }
}
