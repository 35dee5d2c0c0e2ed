//! Egress policy on the command line: options of `run`, `pasta`, `passt` and `slirp4netns`, presets, and `ringfence policy`.
//!
//! The process that starts the uplink reads files and parses every rule before it starts another one (`guest`). The
//! uplink's process receives the rules over its channel and decides; nothing in the guest takes part. `policy set`
//! hands another policy to the launcher of a running guest, or to its session ([`document`], [`live`]).

pub mod document;
pub mod guest;
pub mod live;
pub mod presets;
mod records;

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use ringfence_policy::file::FILE_MAX;
use ringfence_policy::policy::RULES_MAX;
use ringfence_policy::{Action, Policy, PolicySource, RuleSource, file};
use ringfence_sys::numbers::u64_from;

use crate::upstream::ProxyArgs;

/// Heading of the options about egress.
const HEADING: &str = "Egress";

/// Options about the names and addresses that the guest may reach.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct EgressArgs {
    /// Allow the guest to reach this; may be given several times. The first rule denies everything else
    ///
    /// Examples: `pypi.org:443`, `*.example.org:80,443/tcp`, `10.1.0.0/16:5432`, `[2001:db8::]/32`, `icmp`,
    /// `pypi.org:443 bytes=10M connections=100 at-once=5` with limits of the guest. A name
    /// without ports stands for all of them except those of DNS (53, 853). The name server refuses other names, so
    /// they do not leave this computer. A name never leads to a private or link-local address; a rule with the
    /// address does.
    #[arg(long, value_name = "RULE", help_heading = HEADING)]
    pub allow: Vec<String>,

    /// Deny the guest to reach this, whatever else is allowed; may be given several times
    #[arg(long, value_name = "RULE", help_heading = HEADING)]
    pub deny: Vec<String>,

    /// Apply the rules of a policy file (TOML); may be given several times
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub policy: Vec<PathBuf>,

    /// Apply the rules of a policy that comes with Ringfence; may be given several times
    #[arg(long, value_name = "NAME", value_parser = presets::parser(), help_heading = HEADING)]
    pub policy_preset: Vec<String>,

    /// Refuse TLS connections to allowed names that show no server name, or hide it (ECH)
    #[arg(long, help_heading = HEADING)]
    pub strict_sni: bool,

    /// Append each verdict to this file as a JSON object; `-` is standard error
    ///
    /// Repetitions within ten seconds are one line with their count. Works without a policy, too.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub egress_log: Option<PathBuf>,

    /// Allow everything, and write the policy that would have allowed what was done to this file
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub egress_learn: Option<PathBuf>,

    /// Proxy that carries what the rules allow.
    #[command(flatten)]
    pub proxy: ProxyArgs,
}

impl EgressArgs {
    /// Returns `true` if an option asks for a policy, for records, or for a proxy, which needs a policy.
    pub fn are_given(&self) -> bool {
        let has_files = self.egress_log.is_some() || self.egress_learn.is_some();
        has_files || self.proxy.upstream_proxy.is_some() || self.name_rules()
    }

    fn name_rules(&self) -> bool {
        !self.allow.is_empty()
            || !self.deny.is_empty()
            || !self.policy.is_empty()
            || !self.policy_preset.is_empty()
            || self.strict_sni
    }

    /// Reads the policy that the options describe. Returns `None` if they describe none.
    ///
    /// # Errors
    ///
    /// Returns the first error, with a caret below the wrong character of a rule.
    pub fn source(&self) -> anyhow::Result<Option<PolicySource>> {
        if !self.are_given() {
            return Ok(None);
        }
        let mut source = PolicySource { strict_sni: self.strict_sni, ..PolicySource::default() };
        let given = [(Action::Allow, "--allow", &self.allow), (Action::Deny, "--deny", &self.deny)];
        for (action, option, rules) in given {
            source.rules.extend(rules.iter().map(|text| RuleSource {
                action,
                text: text.clone(),
                origin: option.to_owned(),
            }));
        }
        for path in &self.policy {
            source.append(read(path)?);
        }
        for name in &self.policy_preset {
            source.append(presets::read(name)?);
        }
        if source.is_empty() && self.name_rules() {
            bail!("the policy has no rule: give one with --allow or --deny, or in the policy file");
        }
        // The uplink's process parses the same rules; errors are reported here.
        Policy::new(source.clone())?;
        Ok(Some(source))
    }
}

/// Maximum number of files of one policy.
pub const FILES_MAX: usize = 64;

/// Reads a policy file and those that it includes, each once. Their names are relative to the folder of the file that names
/// them.
///
/// # Errors
///
/// Returns the reason for which a file cannot be read, or the first error in one.
pub fn read(path: &Path) -> anyhow::Result<PolicySource> {
    let mut policy = PolicySource::default();
    let mut seen = HashSet::new();
    // The files that wait, the next one at the end, with the place that names them.
    let mut waiting = vec![(path.to_owned(), "--policy".to_owned())];
    while let Some((path, place)) = waiting.pop() {
        let shown = path.display().to_string();
        let context = || format!("{place} {shown}");
        let file = File::open(&path).with_context(context)?;
        let facts = file.metadata().with_context(context)?;
        if !seen.insert((facts.dev(), facts.ino())) {
            continue;
        }
        if seen.len() > FILES_MAX {
            bail!("{place} {shown}: a policy has at most {FILES_MAX} files");
        }
        let mut text = String::new();
        let limit = u64_from(FILE_MAX + 1);
        file.take(limit).read_to_string(&mut text).with_context(context)?;
        let part = file::parse_part(&shown, &text)?;
        policy.append(part.source);
        if policy.rules.len() > RULES_MAX {
            bail!("{place} {shown}: more than {RULES_MAX} rules with those of the other files");
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let included = part.includes.into_iter().rev();
        waiting
            .extend(included.map(|(name, line)| (folder.join(name), format!("{shown}:{line}:"))));
    }
    Ok(policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn included_files_are_read_once_from_the_folder_of_their_file() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir(at("sub")).unwrap();
        std::fs::write(at("a.toml"), "include = ['sub/b.toml', 'c.toml']\nallow = ['a.org']")
            .unwrap();
        let sub = "include = ['../c.toml', '../a.toml']\nallow = ['b.org']\nstrict-sni = true";
        std::fs::write(at("sub/b.toml"), sub).unwrap();
        std::fs::write(at("c.toml"), "deny = ['c.org']\ndefault = 'deny'").unwrap();
        let policy = read(&at("a.toml")).unwrap();
        let texts: Vec<_> = policy.rules.iter().map(|rule| rule.text.as_str()).collect();
        assert_eq!(texts, ["a.org", "b.org", "c.org"]);
        assert!(policy.strict_sni && policy.default == Some(Action::Deny));
        assert!(policy.rules[1].origin.ends_with("sub/b.toml:2"), "{}", policy.rules[1].origin);
    }

    #[test]
    fn include_that_cannot_be_read_names_its_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.toml");
        std::fs::write(&path, "allow = ['a.org']\ninclude = ['missing.toml']").unwrap();
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("a.toml:2: ") && error.contains("missing.toml"), "{error}");
    }

    #[test]
    fn chain_of_too_many_files_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..=FILES_MAX {
            let text = format!("include = ['{}.toml']\nallow = ['a.org']", number + 1);
            std::fs::write(directory.path().join(format!("{number}.toml")), text).unwrap();
        }
        let error = read(&directory.path().join("0.toml")).unwrap_err().to_string();
        assert!(error.contains("at most 64 files"), "{error}");
    }
}
