//! `ringfence policy import`: converts the settings of other programs to a policy file.
//!
//! ```text
//! sandbox-runtime's JSON ── srt ────┐
//!                                   ├──> Imported: rules, remarks ──> policy file
//! Cilium's YAML ── yaml ── cilium ──┘
//! ```
//!
//! The policy file allows no more than the settings, but for patterns whose remark says so. A remark names each part that has no
//! rule. Each rule was parsed before it is written.

mod cilium;
mod srt;
mod yaml;

use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};
use ringfence_policy::file::FILE_MAX;
use ringfence_policy::policy::RULES_MAX;
use ringfence_policy::refusal::clean;
use ringfence_policy::{Action, Rule};
use ringfence_sys::numbers::u64_from;

/// Program whose settings are converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ImportFormat {
    /// Settings file of sandbox-runtime or Claude Code (JSON)
    Srt,
    /// CiliumNetworkPolicy with toFQDNs or toCIDR (YAML or JSON)
    Cilium,
}

/// Maximum number of remarks in a policy file.
const REMARKS_MAX: usize = 1000;

/// Rules and remarks of a policy file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Imported {
    allow: Vec<String>,
    deny: Vec<String>,
    remarks: Vec<String>,
}

impl Imported {
    /// Adds a rule once. One that is malformed becomes a remark about `place`.
    fn add(&mut self, action: Action, place: &str, text: &str) {
        let rules = match action {
            Action::Allow => &mut self.allow,
            Action::Deny => &mut self.deny,
        };
        match text.parse::<Rule>() {
            Ok(rule) => {
                let rule = rule.to_string();
                if !rules.contains(&rule) {
                    rules.push(rule);
                }
            }
            Err(error) => self.remark(place, &format!("`{text}` is no rule: {error}")),
        }
    }

    /// Adds a remark about a part of the settings, once.
    fn remark(&mut self, place: &str, text: &str) {
        let remark = clean(&format!("{place}: {text}"));
        if self.remarks.len() < REMARKS_MAX && !self.remarks.contains(&remark) {
            self.remarks.push(remark);
        }
    }

    /// Writes the policy file.
    fn to_toml(&self, file: &str) -> String {
        let mut text = clean(&format!("# Imported from {file}. Review it before use."));
        text.push('\n');
        if !self.remarks.is_empty() {
            text.push_str("#\n# Not converted, or converted with another meaning:\n");
        }
        for remark in &self.remarks {
            let _ = writeln!(text, "# * {remark}");
        }
        text.push_str("default = \"deny\"\n");
        for (name, rules) in [("allow", &self.allow), ("deny", &self.deny)] {
            if rules.is_empty() {
                continue;
            }
            let _ = writeln!(text, "{name} = [");
            for rule in rules {
                let _ = writeln!(text, "    \"{rule}\",");
            }
            text.push_str("]\n");
        }
        text
    }
}

/// Returns the policy file for the settings in a file.
///
/// # Errors
///
/// Returns the reason for which the file cannot be read, or is no settings file.
pub(super) fn import(path: &Path, from: Option<ImportFormat>) -> anyhow::Result<String> {
    let shown = path.display().to_string();
    let mut text = String::new();
    let file = File::open(path).with_context(|| shown.clone())?;
    file.take(u64_from(FILE_MAX + 1)).read_to_string(&mut text).with_context(|| shown.clone())?;
    if text.len() > FILE_MAX {
        bail!("{shown}: more than {FILE_MAX} bytes");
    }
    let imported = convert(&text, from).with_context(|| shown.clone())?;
    let count = imported.allow.len() + imported.deny.len();
    if count > RULES_MAX {
        bail!("{shown}: {count} rules; a policy has at most {RULES_MAX}: divide the file");
    }
    Ok(imported.to_toml(&shown))
}

fn convert(text: &str, from: Option<ImportFormat>) -> anyhow::Result<Imported> {
    match from.unwrap_or_else(|| guess(text)) {
        ImportFormat::Srt => srt::convert(text),
        ImportFormat::Cilium => cilium::convert(text),
    }
}

/// Returns the program whose settings a text is: JSON without a `kind` is that of sandbox-runtime.
fn guess(text: &str) -> ImportFormat {
    let has_kind = text.contains("\"kind\"");
    if text.trim_start().starts_with('{') && !has_kind {
        ImportFormat::Srt
    } else {
        ImportFormat::Cilium
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringfence_policy::{Policy, file};

    use super::*;

    /// Parses the policy file of settings.
    fn policy(text: &str, from: Option<ImportFormat>) -> Policy {
        let toml = convert(text, from).unwrap().to_toml("settings\n[x]");
        Policy::new(file::parse("p.toml", &toml).unwrap()).unwrap()
    }

    #[test]
    fn format_is_guessed_by_the_form_of_the_text() {
        assert_eq!(guess(" {\"network\": {}}"), ImportFormat::Srt);
        assert_eq!(guess("{\"kind\": \"List\"}"), ImportFormat::Cilium);
        assert_eq!(guess("apiVersion: cilium.io/v2\nkind: x"), ImportFormat::Cilium);
    }

    #[test]
    fn settings_without_a_rule_deny_everything() {
        let policy = policy("{\"network\": {\"allowedDomains\": []}}", None);
        assert!(policy.is_empty() && policy.default_action() == Action::Deny);
    }

    #[test]
    fn remark_stays_on_its_line() {
        let mut imported = Imported::default();
        imported.remark("a\nallow = [\"*\"]", "b\u{1b}[2J");
        imported.add(Action::Allow, "x", "a\"]\n.org");
        let text = imported.to_toml("f");
        assert!(text.lines().all(|line| line.starts_with('#') || line == "default = \"deny\""));
        assert_eq!(imported.remarks.len(), 2);
    }

    proptest! {
        #[test]
        fn any_settings_become_a_policy_file_or_an_error(
            text in "(spec|egress|toFQDNs|matchName|matchPattern|toPorts|ports|port|kind|network|allowedDomains|deniedDomains|a.org|\\*|443|- |: |, |\n {0,6}|\\{|\\}|\\[|\\]|\"|&a |\\*a |\\PC){0,60}",
            is_srt: bool,
        ) {
            let from = if is_srt { ImportFormat::Srt } else { ImportFormat::Cilium };
            if let Ok(imported) = convert(&text, Some(from)) {
                let toml = imported.to_toml("f");
                let source = file::parse("p.toml", &toml).unwrap();
                prop_assert_eq!(source.default, Some(Action::Deny));
                prop_assert!(Policy::new(source).is_ok(), "{}", toml);
            }
        }

        #[test]
        fn domains_of_srt_are_the_rules_of_the_policy(
            hosts in prop::collection::vec(("(\\*\\.)?[a-c]{1,3}\\.(org|example)", prop::option::of(1..u16::MAX)), 0..8),
        ) {
            let entry = |(host, port): &(String, Option<u16>)| match port {
                Some(port) => format!("{host}:{port}"),
                None => host.clone(),
            };
            let domains: Vec<String> = hosts.iter().map(entry).collect();
            let text = serde_json::json!({ "network": { "allowedDomains": domains } }).to_string();
            let policy = policy(&text, None);
            for (host, port) in &hosts {
                let host = ringfence_policy::HostName::parse(&host.replace('*', "x")).unwrap();
                let port = port.unwrap_or(8443);
                let verdict = policy.name(&host, port, ringfence_policy::Protocol::Tcp);
                prop_assert!(verdict.is_allowed());
            }
        }
    }
}
