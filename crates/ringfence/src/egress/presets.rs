//! Policies that come with Ringfence. The files are in `dist/policies`, and also part of the program.

use clap::builder::PossibleValuesParser;
use ringfence_policy::{PolicySource, file};

const PRESETS: [(&str, &str); 5] = [
    ("pypi", include_str!("../../../../dist/policies/pypi.toml")),
    ("npm", include_str!("../../../../dist/policies/npm.toml")),
    ("crates", include_str!("../../../../dist/policies/crates.toml")),
    ("debian", include_str!("../../../../dist/policies/debian.toml")),
    ("github", include_str!("../../../../dist/policies/github.toml")),
];

/// Returns the parser of a preset's name.
pub(super) fn parser() -> PossibleValuesParser {
    PossibleValuesParser::new(PRESETS.map(|(name, _)| name))
}

/// Returns the policy of a preset.
pub(super) fn read(name: &str) -> anyhow::Result<PolicySource> {
    let preset = PRESETS.iter().find(|(known, _)| *known == name);
    let (name, text) = preset.ok_or_else(|| anyhow::anyhow!("there is no preset `{name}`"))?;
    Ok(file::parse(&format!("preset {name}"), text)?)
}

#[cfg(test)]
mod tests {
    use ringfence_policy::{Action, Policy};

    use super::*;

    #[test]
    fn each_preset_is_a_policy_that_denies_the_rest() {
        for (name, _) in PRESETS {
            let policy = Policy::new(read(name).unwrap()).unwrap();
            assert!(policy.default_action() == Action::Deny && !policy.is_empty(), "{name}");
        }
    }
}
