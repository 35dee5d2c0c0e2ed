//! Scenarios: shell scripts in `vm/xen/scenarios` and `vm/linux/scenarios`. The comment at the top of each has the
//! fields that the harness reads:
//!
//! ```sh
//! # title: one line on the scenario's subject
//! # set: core            (in `cargo xtask test`; `all`: with --all; `name`: only by name)
//! # machine: plain       (scenarios of one machine may share a boot)
//! # limit: 60            (seconds on an idle computer of two cores)
//! # grants: bad          (optional: it offers bad grants on purpose; `bad 0x7`: only that one)
//! # report: a page ...   (optional: the hypervisor reports a fault with these words, which the scenario causes on purpose)
//! # hypervisor: debug    (optional: it needs a debug build; `guards`: the one whose guards can be taken out)
//! # group: window        (optional: it runs with all others of this group, by the group's name)
//! # tests: uplink        (optional: integration tests of `ringfence` that it runs)
//! # driver: netfront     (optional: it needs the module of `linux/netfront`)
//! # kernel: newest       (optional: it boots guests with the newest kernel of Debian's backports; `debug`: with one that
//!                         has KASAN, lockdep and kmemleak)
//! # driver: window       (optional: it needs the module of `linux/grant-window`, and the hypervisor of `xen/`)
//! # driver: window-tests (optional: the same, with the agent and the module of `xen/tests`)
//! # driver: netfront window (optional: several of them)
//! # driver: lent-pool    (optional: it needs the module of `linux/lent-pool`)
//! # options: rate=2      (optional: it needs these words on the hypervisor's command line)
//! # parts: qemu grub     (optional: dom0 has these parts, see `parts.rs`)
//! # sampled: modes       (optional: it uses `modes_of`, for which the processor modes of the machine are sampled)
//! ```

use std::path::Path;

use anyhow::Context as _;

use super::complaints::is_fault;
use super::machine::Kind;
use super::parts::Part;

/// Sets of scenarios, by the condition under which they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Set {
    /// Scenarios of every run.
    Core,
    /// Scenarios that only `--all` adds.
    All,
    /// Scenarios that run only by name.
    Name,
}

/// Scenario with the fields of its comment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scenario {
    /// Name of the file without `.sh`.
    pub(crate) name: String,
    /// Subject in one line.
    pub(crate) title: String,
    pub(crate) set: Set,
    /// Name that selects the scenario together with others.
    pub(crate) group: Option<String>,
    pub(crate) machine: Kind,
    /// Time limit in seconds.
    pub(crate) limit: u32,
    /// Grants about which a debug build of the hypervisor will complain.
    pub(crate) bad_grants: BadGrants,
    /// Words of a fault that the hypervisor must report, because the scenario causes it on purpose.
    pub(crate) report: Option<String>,
    /// Set if the scenario runs only with a debug build of the hypervisor.
    pub(crate) wants_debug: bool,
    /// Set if the hypervisor must be the variant whose guards can be removed at run time.
    pub(crate) wants_guards: bool,
    /// Integration tests that the scenario runs.
    pub(crate) tests: Vec<String>,
    /// Set if it wants the module of `linux/netfront`.
    pub(crate) wants_driver: bool,
    /// Set if it wants the module of `linux/grant-window`, and a hypervisor with grant windows.
    pub(crate) wants_windows: bool,
    /// Set if it wants the test agent of `xen/tests` as well.
    pub(crate) wants_window_tests: bool,
    /// Set if it wants the module of `linux/lent-pool`.
    pub(crate) wants_lent_pool: bool,
    /// Words that it wants on the hypervisor's command line.
    pub(crate) options: String,
    /// Set if it samples the modes of the machine's processors.
    pub(crate) wants_modes: bool,
    /// Set if it boots guests with the newest kernel of Debian's backports.
    pub(crate) wants_newest_kernel: bool,
    /// Set if it boots guests with a kernel that has KASAN, lockdep and kmemleak.
    pub(crate) wants_debug_kernel: bool,
    /// Parts of dom0's root file system that it wants: foreign ends, tests.
    pub(crate) parts: Vec<Part>,
}

/// Bad grants that a scenario offers on purpose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BadGrants {
    None,
    Any,
    /// Only this reference, in the form that the hypervisor logs.
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

    /// Returns `true` if the scenario causes this complaint on purpose.
    pub(crate) fn expect(&self, complaint: &str) -> bool {
        match self {
            BadGrants::None => false,
            BadGrants::Any => true,
            BadGrants::Only(reference) => {
                complaint.split_whitespace().any(|word| word == reference)
            }
        }
    }
}

impl Scenario {
    /// Returns those of the hypervisor's `complaints` that the scenario does not cause on purpose, and a complaint of the
    /// harness if the report that it must cause is missing.
    pub(crate) fn unexpected(&self, complaints: Vec<String>) -> Vec<String> {
        let reported =
            |line: &String| self.report.as_ref().is_some_and(|words| line.contains(words));
        let missing = self.report.as_ref().filter(|_| !complaints.iter().any(reported));
        let missing = missing.map(|words| format!("the hypervisor did not report: {words}"));
        let expected =
            |line: &String| reported(line) || (!is_fault(line) && self.bad_grants.expect(line));
        complaints.into_iter().filter(|line| !expected(line)).chain(missing).collect()
    }
}

/// Returns the scenarios in `folder` by name. Their machines must be in `kinds`.
pub(crate) fn find(folder: &Path, kinds: &[Kind]) -> anyhow::Result<Vec<Scenario>> {
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

/// Returns a field of the comment at the top of a script.
pub fn field<'a>(text: &'a str, key: &str) -> anyhow::Result<&'a str> {
    let mut head = text.lines().take_while(|line| line.starts_with('#'));
    let value =
        head.find_map(|line| line.strip_prefix("# ")?.strip_prefix(key)?.strip_prefix(": "));
    value.map(str::trim).with_context(|| format!("lacks the line `# {key}: ...` at its top"))
}

fn parse(name: &str, text: &str) -> anyhow::Result<Scenario> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    anyhow::ensure!(name.chars().all(plain), "a scenario's name is of a-z, 0-9 and -");
    let field = |key: &str| field(text, key);
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
        hypervisor.is_none_or(|word| ["debug", "guards"].contains(&word)),
        "`# hypervisor: ...` can only be debug or guards"
    );
    let drivers: Vec<&str> = field("driver").unwrap_or_default().split_whitespace().collect();
    anyhow::ensure!(
        drivers
            .iter()
            .all(|word| ["netfront", "window", "window-tests", "lent-pool"].contains(word)),
        "`# driver: ...` can only be netfront, window, window-tests, lent-pool, or several of them"
    );
    let kernel = field("kernel").ok();
    anyhow::ensure!(
        kernel.is_none_or(|word| ["newest", "debug"].contains(&word)),
        "`# kernel: ...` can only be newest or debug"
    );
    let sampled = field("sampled").ok();
    anyhow::ensure!(
        sampled.is_none_or(|word| word == "modes"),
        "`# sampled: ...` can only be modes"
    );
    anyhow::ensure!(
        sampled.is_some() || !text.contains("modes_of "),
        "`modes_of` needs the line `# sampled: modes`"
    );
    Ok(Scenario {
        name: name.to_owned(),
        title: field("title")?.to_owned(),
        set,
        group: field("group").ok().map(str::to_owned),
        machine: Kind::from_name(machine)
            .with_context(|| format!("no machine is called {machine}"))?,
        limit: field("limit")?.parse().context("`# limit: ...` is a number of seconds")?,
        bad_grants,
        report: field("report").ok().map(str::to_owned),
        wants_debug: hypervisor.is_some(),
        wants_guards: hypervisor == Some("guards"),
        tests: field("tests").unwrap_or_default().split_whitespace().map(str::to_owned).collect(),
        wants_driver: drivers.contains(&"netfront"),
        wants_windows: drivers.iter().any(|word| word.starts_with("window")),
        wants_window_tests: drivers.contains(&"window-tests"),
        wants_lent_pool: drivers.contains(&"lent-pool"),
        options: field("options").unwrap_or_default().to_owned(),
        wants_modes: sampled.is_some(),
        wants_newest_kernel: kernel == Some("newest"),
        wants_debug_kernel: kernel == Some("debug"),
        parts: Part::parse(field("parts").unwrap_or_default())?,
    })
}

/// Returns the scenarios with the given names and those of the groups with the given names, or without names those of
/// the sets up to `set`. `debug` states that the hypervisor is a debug build.
pub(crate) fn select(
    found: &[Scenario],
    names: &[String],
    set: Set,
    debug: bool,
) -> anyhow::Result<Vec<Scenario>> {
    if names.is_empty() {
        let wanted = |s: &&Scenario| s.set <= set && (debug || !s.wants_debug) && !s.wants_guards;
        return Ok(found.iter().filter(wanted).cloned().collect());
    }
    let mut selected: Vec<Scenario> = vec![];
    for name in names {
        let is_meant = |s: &&Scenario| s.name == *name || s.group.as_ref() == Some(name);
        let meant: Vec<_> = found.iter().filter(is_meant).collect();
        anyhow::ensure!(
            !meant.is_empty(),
            "no scenario is called {name}, and no group; --list names them"
        );
        for scenario in meant {
            anyhow::ensure!(
                debug || !scenario.wants_debug,
                "{} runs with --debug-xen only",
                scenario.name
            );
            if !selected.contains(scenario) {
                selected.push(scenario.clone());
            }
        }
    }
    Ok(selected)
}

/// Removes the scenarios that need another kernel for guests, or a program of this release's backports, which are made for
/// this computer's release. It is an error if they were `named`.
pub(crate) fn of_other_release(
    selected: Vec<Scenario>,
    named: bool,
) -> anyhow::Result<Vec<Scenario>> {
    let wants_own = |s: &Scenario| {
        s.wants_newest_kernel || s.wants_debug_kernel || s.parts.contains(&Part::QemuNewest)
    };
    let (own, rest): (Vec<_>, Vec<_>) = selected.into_iter().partition(wants_own);
    if !own.is_empty() {
        let names: Vec<&str> = own.iter().map(|scenario| scenario.name.as_str()).collect();
        let names = names.join(", ");
        let why = "a part of them is made for this computer's release only";
        anyhow::ensure!(!named, "{names}: {why}");
        println!("without {names}: {why}");
    }
    Ok(rest)
}

/// Distributes scenarios to boots. Scenarios of one machine with the same options share a boot of at most `most`
/// seconds, the sum of their limits: boots run at the same time, and the scenarios after a crash need another boot.
pub(crate) fn deal(selected: Vec<Scenario>, most: u32) -> Vec<Vec<Scenario>> {
    let mut boots: Vec<Vec<Scenario>> = vec![];
    for scenario in selected {
        let fits = |boot: &&mut Vec<Scenario>| {
            let time: u32 = boot.iter().map(|there| there.limit).sum();
            let alike = boot[0].machine == scenario.machine && boot[0].options == scenario.options;
            alike && time + scenario.limit <= most
        };
        match boots.iter_mut().find(fits) {
            Some(boot) => boot.push(scenario),
            None => boots.push(vec![scenario]),
        }
    }
    // The longest boots come first, so that boots that run at the same time end at about the same time.
    boots.sort_by_key(|boot| std::cmp::Reverse(boot.iter().map(|there| there.limit).sum::<u32>()));
    boots
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "#!/bin/sh\n# title: all is well\n# set: core\n# machine: xen\n# limit: 40\n\ncomplete_scenario\n# set: all\n";

    #[test]
    fn fields_of_scenario_are_parsed() {
        let scenario = parse("hello", TEXT).unwrap();
        assert_eq!((scenario.title.as_str(), scenario.set), ("all is well", Set::Core));
        assert_eq!((scenario.machine, scenario.limit), (Kind::Xen, 40));
        assert!(scenario.tests.is_empty());
        let runs = TEXT.replace("# limit", "# tests: one two\n# limit");
        assert_eq!(parse("hello", &runs).unwrap().tests, ["one", "two"]);
        assert!(!scenario.wants_driver);
        let driver = TEXT.replace("# limit", "# driver: netfront\n# limit");
        assert!(parse("hello", &driver).unwrap().wants_driver);
        let tests = TEXT.replace("# limit", "# driver: window-tests\n# options: a=2 b\n# limit");
        let tests = parse("hello", &tests).unwrap();
        assert!(tests.wants_windows && tests.wants_window_tests && !tests.wants_driver);
        let pool = TEXT.replace("# limit", "# driver: lent-pool\n# limit");
        let pool = parse("hello", &pool).unwrap();
        assert!(pool.wants_lent_pool && !pool.wants_driver && !pool.wants_windows);
        let both = TEXT.replace("# limit", "# driver: netfront window\n# limit");
        let both = parse("hello", &both).unwrap();
        assert!(both.wants_windows && !both.wants_window_tests && both.wants_driver);
        assert_eq!(tests.options, "a=2 b");
        assert!(!tests.wants_modes);
        let sampled = TEXT.replace("# limit", "# sampled: modes\n# limit");
        assert!(parse("hello", &sampled).unwrap().wants_modes);
    }

    #[test]
    fn malformed_field_is_an_error() {
        for (from, to, said) in [
            ("# limit: 40\n", "", "lacks the line `# limit: ...`"),
            ("set: core", "set: some", "core, all or name"),
            ("machine: xen", "machine: vax", "no machine is called vax"),
            ("limit: 40", "limit: long", "a number of seconds"),
            ("# limit", "# kernel: oldest\n# limit", "can only be newest or debug"),
            ("# limit", "# sampled: heap\n# limit", "can only be modes"),
            (
                "complete_scenario\n",
                "modes_of true\ncomplete_scenario\n",
                "needs the line `# sampled: modes`",
            ),
            (
                "# limit",
                "# driver: blkfront\n# limit",
                "can only be netfront, window, window-tests, lent-pool, or several",
            ),
            ("# limit", "# driver: netfront blkfront\n# limit", "can only be netfront"),
        ] {
            let error = parse("hello", &TEXT.replace(from, to)).unwrap_err();
            assert!(format!("{error:#}").contains(said), "{error:#}");
        }
        assert!(parse("a b", TEXT).is_err());
    }

    #[test]
    fn only_listed_bad_grant_is_expected() {
        let complaint = "(XEN) common/grant_table.c:1053:d0v0 Bad ref 0xdbba0 for d2";
        let parsed = |words| BadGrants::parse(words).unwrap();
        assert!(!parsed(None).expect(complaint));
        assert!(parsed(Some("bad")).expect(complaint));
        assert!(parsed(Some("bad 0xdbba0")).expect(complaint));
        assert!(!parsed(Some("bad 0xdbba")).expect(complaint));
        assert!(BadGrants::parse(Some("good")).is_err());
        assert!(BadGrants::parse(Some("bad 7")).is_err());
    }

    #[test]
    fn report_of_fault_is_expected_only_by_its_words_and_must_come() {
        let text = TEXT.replace("# limit", "# report: cannot be unmapped\n# grants: bad\n# limit");
        let scenario = parse("hello", &text).unwrap();
        let lines =
            |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        let (report, other) = ("(XEN) a page cannot be unmapped: -1", "(XEN) Assertion 'x' failed");
        let grant = "(XEN) common/grant_table.c:1053:d0v0 Bad ref 0x1 for d2";
        assert_eq!(scenario.unexpected(lines(&[report, other, grant])), [other]);
        assert_eq!(scenario.unexpected(lines(&[grant])).len(), 1, "the report is missing");
        let plain = parse("hello", TEXT).unwrap();
        assert_eq!(plain.unexpected(lines(&[report])), [report]);
        assert!(plain.unexpected(vec![]).is_empty());
    }

    fn scenario(name: &str, set: Set, machine: Kind, limit: u32) -> Scenario {
        Scenario {
            name: name.to_owned(),
            title: String::new(),
            set,
            group: None,
            machine,
            limit,
            bad_grants: BadGrants::None,
            report: None,
            wants_debug: false,
            wants_guards: false,
            tests: vec![],
            wants_driver: false,
            wants_lent_pool: false,
            wants_windows: false,
            wants_window_tests: false,
            options: String::new(),
            wants_modes: false,
            wants_newest_kernel: false,
            wants_debug_kernel: false,
            parts: vec![],
        }
    }

    #[test]
    fn names_take_precedence_over_sets() {
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
    fn scenarios_with_builds_of_this_release_are_left_out_unless_named() {
        let plain = scenario("a", Set::All, Kind::Xen, 10);
        let driver = Scenario { wants_driver: true, ..scenario("b", Set::All, Kind::Xen, 10) };
        let windows = Scenario { wants_windows: true, ..scenario("c", Set::All, Kind::Xen, 10) };
        let debug = Scenario { wants_debug_kernel: true, ..driver.clone() };
        let newest = Scenario { wants_newest_kernel: true, ..driver.clone() };
        let part = |part| Scenario { parts: vec![part], ..scenario("d", Set::All, Kind::Xen, 10) };
        let possible = vec![plain, driver, windows, part(Part::Grub)];
        assert_eq!(of_other_release(possible.clone(), true).unwrap(), possible);
        for other in [newest, debug, part(Part::QemuNewest)] {
            let all: Vec<_> = possible.iter().cloned().chain([other]).collect();
            assert_eq!(of_other_release(all.clone(), false).unwrap(), possible);
            assert!(of_other_release(all, true).is_err());
        }
    }

    #[test]
    fn group_selects_each_of_its_scenarios_once() {
        let group = Some("g".to_owned());
        let found = [
            Scenario { group: group.clone(), ..scenario("a", Set::Name, Kind::Xen, 10) },
            scenario("b", Set::Name, Kind::Xen, 10),
            Scenario { group, ..scenario("c", Set::Name, Kind::Xen, 10) },
        ];
        let names = ["c", "g", "b"].map(str::to_owned);
        let selected = select(&found, &names, Set::Core, false).unwrap();
        let selected: Vec<_> = selected.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(selected, ["c", "a", "b"]);
        assert_eq!(
            parse("x", &TEXT.replace("# limit", "# group: g\n# limit")).unwrap().group.as_deref(),
            Some("g")
        );
    }

    #[test]
    fn scenarios_of_one_machine_share_boot() {
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
        let plain = scenario("a", Set::Core, Kind::Xen, 30);
        let other = Scenario { options: "rate=2".to_owned(), ..plain.clone() };
        assert_eq!(deal(vec![plain, other], 100).len(), 2, "other options need another boot");
    }
}
