//! Scenarios: shell scripts in `vm/xen/scenarios` and `vm/linux/scenarios`. The comment at the top
//! of each says what the harness must know:
//!
//! ```sh
//! # title: one line on what it shows
//! # set: core            (in `cargo xtask test`; `all`: with --all; `name`: when it is named)
//! # machine: plain       (scenarios of one machine may share a boot)
//! # limit: 60            (seconds on an idle computer of two cores)
//! # grants: bad          (may be left out: it offers bad grants on purpose; or, as `bad 0x7`, that one)
//! # hypervisor: debug    (may be left out: it wants one that was built for debugging)
//! # tests: uplink        (may be left out: integration tests of `ringfence` that it runs)
//! # driver: netfront     (may be left out: it wants the module of `linux/netfront`)
//! ```

use std::path::Path;

use anyhow::Context as _;

use super::machine::Kind;

/// When a scenario runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Set {
    /// Always.
    Core,
    /// With `--all`.
    All,
    /// When it is named.
    Name,
}

/// One scenario.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scenario {
    /// The file's name without `.sh`.
    pub(super) name: String,
    /// What it shows.
    pub(super) title: String,
    /// When it runs.
    pub(super) set: Set,
    /// Which machine it wants.
    pub(super) machine: Kind,
    /// How long it may take, in seconds.
    pub(super) limit: u32,
    /// Of what a hypervisor built for debugging will complain.
    pub(super) bad_grants: BadGrants,
    /// It runs with a hypervisor built for debugging only.
    pub(super) wants_debug: bool,
    /// The integration tests that it runs.
    pub(super) tests: Vec<String>,
    /// Set if it wants the module of `linux/netfront`.
    pub(super) wants_driver: bool,
}

/// The bad grants that a scenario offers on purpose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BadGrants {
    None,
    Any,
    /// This reference, as the hypervisor writes it.
    Only(String),
}

impl BadGrants {
    fn parse(words: Option<&str>) -> anyhow::Result<BadGrants> {
        match words.map(|words| words.split_whitespace().collect::<Vec<_>>()).as_deref() {
            None => Ok(BadGrants::None),
            Some(["bad"]) => Ok(BadGrants::Any),
            Some(["bad", reference]) if reference.starts_with("0x") => {
                Ok(BadGrants::Only((*reference).to_owned()))
            }
            _ => anyhow::bail!("`# grants: ...` can only be `bad` or `bad 0x...`"),
        }
    }

    /// Whether the scenario is to cause this line on the console.
    pub(super) fn expect(&self, complaint: &str) -> bool {
        match self {
            BadGrants::None => false,
            BadGrants::Any => true,
            BadGrants::Only(reference) => {
                complaint.split_whitespace().any(|word| word == reference)
            }
        }
    }
}

/// The scenarios in `folder`, by name; their machines must be among `kinds`.
pub(super) fn find(folder: &Path, kinds: &[Kind]) -> anyhow::Result<Vec<Scenario>> {
    let mut scenarios = vec![];
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".sh"))
        else {
            continue;
        };
        let scenario = parse(name, &std::fs::read_to_string(&path)?)
            .and_then(|scenario| {
                anyhow::ensure!(
                    kinds.contains(&scenario.machine),
                    "that machine is not of this suite"
                );
                Ok(scenario)
            })
            .with_context(|| path.display().to_string())?;
        scenarios.push(scenario);
    }
    scenarios.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(scenarios)
}

fn parse(name: &str, text: &str) -> anyhow::Result<Scenario> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    anyhow::ensure!(name.chars().all(plain), "a scenario's name is of a-z, 0-9 and -");
    let field = |key: &str| {
        let mut head = text.lines().take_while(|line| line.starts_with('#'));
        let value =
            head.find_map(|line| line.strip_prefix("# ")?.strip_prefix(key)?.strip_prefix(": "));
        value.map(str::trim).with_context(|| format!("lacks the line `# {key}: ...` at its top"))
    };
    let set = match field("set")? {
        "core" => Set::Core,
        "all" => Set::All,
        "name" => Set::Name,
        other => anyhow::bail!("`# set: {other}`: core, all or name"),
    };
    let machine = field("machine")?;
    let bad_grants = BadGrants::parse(field("grants").ok())?;
    let hypervisor = field("hypervisor").ok();
    anyhow::ensure!(
        hypervisor.is_none_or(|word| word == "debug"),
        "`# hypervisor: ...` can only be debug"
    );
    let driver = field("driver").ok();
    anyhow::ensure!(
        driver.is_none_or(|word| word == "netfront"),
        "`# driver: ...` can only be netfront"
    );
    Ok(Scenario {
        name: name.to_owned(),
        title: field("title")?.to_owned(),
        set,
        machine: Kind::from_name(machine)
            .with_context(|| format!("no machine is called {machine}"))?,
        limit: field("limit")?.parse().context("`# limit: ...` is a number of seconds")?,
        bad_grants,
        wants_debug: hypervisor.is_some(),
        tests: field("tests").unwrap_or_default().split_whitespace().map(str::to_owned).collect(),
        wants_driver: driver.is_some(),
    })
}

/// The scenarios that were asked for: by name, or else those of the sets up to `set`; `debug`: with a
/// hypervisor built for debugging.
pub(super) fn select(
    found: &[Scenario],
    names: &[String],
    set: Set,
    debug: bool,
) -> anyhow::Result<Vec<Scenario>> {
    if names.is_empty() {
        let wanted = |s: &&Scenario| s.set <= set && (debug || !s.wants_debug);
        return Ok(found.iter().filter(wanted).cloned().collect());
    }
    let by_name = |name: &String| {
        let scenario = found.iter().find(|scenario| scenario.name == *name).cloned();
        let scenario =
            scenario.with_context(|| format!("no scenario is called {name}; --list names them"))?;
        anyhow::ensure!(debug || !scenario.wants_debug, "{name} runs with --debug-xen only");
        Ok(scenario)
    };
    names.iter().map(by_name).collect()
}

/// Deals scenarios out to boots: those of one machine share one, but not for longer than `most`
/// seconds by their limits, since boots run beside each other and one that fails spoils its own.
pub(super) fn deal(selected: Vec<Scenario>, most: u32) -> Vec<Vec<Scenario>> {
    let mut boots: Vec<Vec<Scenario>> = vec![];
    for scenario in selected {
        let fits = |boot: &&mut Vec<Scenario>| {
            let time: u32 = boot.iter().map(|there| there.limit).sum();
            boot[0].machine == scenario.machine && time + scenario.limit <= most
        };
        match boots.iter_mut().find(fits) {
            Some(boot) => boot.push(scenario),
            None => boots.push(vec![scenario]),
        }
    }
    // The longest first: then the boots that run beside each other end together.
    boots.sort_by_key(|boot| std::cmp::Reverse(boot.iter().map(|there| there.limit).sum::<u32>()));
    boots
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "#!/bin/sh\n# title: all is well\n# set: core\n# machine: xen\n# limit: 40\n\nplan 1\n# set: all\n";

    #[test]
    fn the_head_of_a_scenario_is_read() {
        let scenario = parse("hello", TEXT).unwrap();
        assert_eq!((scenario.title.as_str(), scenario.set), ("all is well", Set::Core));
        assert_eq!((scenario.machine, scenario.limit), (Kind::Xen, 40));
        assert!(scenario.tests.is_empty());
        let runs = TEXT.replace("# limit", "# tests: one two\n# limit");
        assert_eq!(parse("hello", &runs).unwrap().tests, ["one", "two"]);
        assert!(!scenario.wants_driver);
        let driver = TEXT.replace("# limit", "# driver: netfront\n# limit");
        assert!(parse("hello", &driver).unwrap().wants_driver);
    }

    #[test]
    fn what_is_wrong_with_a_head_is_said() {
        for (from, to, said) in [
            ("# limit: 40\n", "", "lacks the line `# limit: ...`"),
            ("set: core", "set: some", "core, all or name"),
            ("machine: xen", "machine: vax", "no machine is called vax"),
            ("limit: 40", "limit: long", "a number of seconds"),
            ("# limit", "# driver: blkfront\n# limit", "can only be netfront"),
        ] {
            let error = parse("hello", &TEXT.replace(from, to)).unwrap_err();
            assert!(format!("{error:#}").contains(said), "{error:#}");
        }
        assert!(parse("a b", TEXT).is_err());
    }

    #[test]
    fn only_the_bad_grant_that_is_named_is_expected() {
        let complaint = "(XEN) common/grant_table.c:1053:d0v0 Bad ref 0xdbba0 for d2";
        let parsed = |words| BadGrants::parse(words).unwrap();
        assert!(!parsed(None).expect(complaint));
        assert!(parsed(Some("bad")).expect(complaint));
        assert!(parsed(Some("bad 0xdbba0")).expect(complaint));
        assert!(!parsed(Some("bad 0xdbba")).expect(complaint));
        assert!(BadGrants::parse(Some("good")).is_err());
        assert!(BadGrants::parse(Some("bad 7")).is_err());
    }

    fn scenario(name: &str, set: Set, machine: Kind, limit: u32) -> Scenario {
        Scenario {
            name: name.to_owned(),
            title: String::new(),
            set,
            machine,
            limit,
            bad_grants: BadGrants::None,
            wants_debug: false,
            tests: vec![],
            wants_driver: false,
        }
    }

    #[test]
    fn names_win_over_sets() {
        let found = [
            scenario("a", Set::Core, Kind::Xen, 10),
            scenario("b", Set::All, Kind::Xen, 10),
            scenario("c", Set::Name, Kind::Xen, 10),
        ];
        let names = |list: Vec<Scenario>| list.into_iter().map(|s| s.name).collect::<Vec<_>>();
        assert_eq!(names(select(&found, &[], Set::Core, false).unwrap()), ["a"]);
        assert_eq!(names(select(&found, &[], Set::All, false).unwrap()), ["a", "b"]);
        assert_eq!(names(select(&found, &["c".to_owned()], Set::Core, false).unwrap()), ["c"]);
        assert!(select(&found, &["d".to_owned()], Set::Core, false).is_err());
        let debug = [Scenario { wants_debug: true, ..scenario("d", Set::All, Kind::Xen, 10) }];
        assert_eq!(names(select(&debug, &[], Set::All, true).unwrap()), ["d"]);
        assert!(select(&debug, &[], Set::All, false).unwrap().is_empty());
        assert!(select(&debug, &["d".to_owned()], Set::All, false).is_err());
    }

    #[test]
    fn boots_are_shared_by_scenarios_of_one_machine() {
        let dealt = deal(
            vec![
                scenario("a", Set::Core, Kind::Xen, 30),
                scenario("b", Set::Core, Kind::XenPvh, 80),
                scenario("c", Set::Core, Kind::Xen, 30),
                scenario("d", Set::Core, Kind::Xen, 60),
            ],
            100,
        );
        let names: Vec<Vec<&str>> =
            dealt.iter().map(|boot| boot.iter().map(|s| s.name.as_str()).collect()).collect();
        assert_eq!(names, [vec!["b"], vec!["a", "c"], vec!["d"]]);
    }
}
