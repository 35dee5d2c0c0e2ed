use std::path::Path;

use ringfence_access::Mode;
use ringfence_block::storage::file::{Bounce, CacheMode};
use ringfence_net::features::OffloadKeys;

use super::*;

const EXAMPLE: &str = include_str!("../../../../../dist/ringfence.toml");

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, Path::new("ringfence.toml")).map_err(|error| error.to_string())
}

/// Returns the error of a text.
fn wrong(text: &str) -> String {
    parse(text).expect_err(text)
}

#[test]
fn example_file_and_empty_file_equal_defaults() {
    assert_eq!(parse(EXAMPLE), Ok(Config::default()));
    assert_eq!(parse(""), Ok(Config::default()));
}

#[test]
fn example_file_documents_each_option_and_its_effect() {
    let mut section = "";
    let mut documented = Vec::new();
    let mut effect = "";
    for line in EXAMPLE.lines() {
        let tag = Some(line).filter(|line| line.starts_with('#')).and_then(|l| l.rsplit_once('['));
        if let Some((_, word)) = tag.filter(|_| line.ends_with(']')) {
            effect = word.trim_end_matches(']');
        } else if line.starts_with('[') {
            section = line.trim_matches(['[', ']']);
        } else if let Some((key, _)) = line.split_once(" = ").filter(|_| !line.starts_with('#')) {
            documented.push((format!("{section}.{key}"), effect));
        }
    }
    let known: Vec<_> = effects::KEYS.iter().map(|(k, e)| ((*k).to_owned(), e.word())).collect();
    let known: Vec<_> =
        known.into_iter().filter(|(key, _)| key != "device" && key != "disk").collect();
    assert_eq!(documented, known);
}

#[test]
fn value_limits_equal_those_of_configured_parts() {
    assert_eq!(values::QUEUES_MAX, u64::from(ringfence_net::vif::backend::QUEUES_MAX));
    let ports = u64::try_from(ringfence_switch::forwarding::PORTS_MAX).unwrap();
    assert_eq!(disks::QUEUES_MAX, u64::from(ringfence_block::vbd::QUEUES_MAX));
    assert_eq!(disks::RING_ORDER_MAX, u64::from(ringfence_wire::blkif::RING_ORDER_MAX));
    assert_eq!(disks::SEGMENTS_MAX, u64::from(ringfence_wire::blkif::SEGMENTS_MAX));
    assert!(values::DEVICES_MAX < ports, "the host has one too");
    assert!(
        values::ADDRESSES_MAX * 2
            < u64::try_from(ringfence_switch::forwarding::table::CAPACITY).unwrap()
    );
}

#[test]
fn example_file_names_every_mode() {
    for mode in Mode::NETWORK {
        assert!(EXAMPLE.contains(&format!("\"{mode}\"")), "{mode}");
    }
    let disks = Mode::DISK.into_iter().map(|mode| mode.name());
    for name in disks.chain(CacheMode::NAMES.iter().copied()).chain(Bounce::NAMES.iter().copied()) {
        assert!(EXAMPLE.contains(&format!("\"{name}\"")), "{name}");
    }
}

#[test]
fn commented_overrides_of_example_file_are_valid() {
    let exceptions = EXAMPLE.split_once("# [[device]]").map(|(_, rest)| rest).unwrap();
    let text: String = format!("# [[device]]{exceptions}")
        .lines()
        .filter(|line| !line.starts_with("# Exceptions") && !line.starts_with("#  "))
        .map(|line| format!("{}\n", line.trim_start_matches("# ").trim_start_matches('#')))
        .collect();
    let config = parse(&text).unwrap();
    assert_eq!(config.device.len(), 2);
    let router = config.device(Some("router"), None);
    assert_eq!((router.check_source, router.addresses), (false, 256));
    let one = config.device(Some("web"), Some([0, 0x16, 0x3e, 1, 2, 3]));
    assert_eq!((one.offloads, one.check_source), (OffloadKeys::NONE, true));
    assert_eq!(config.device(None, None), Config::default().device(None, None));
    assert_eq!(config.disk.len(), 2);
    let database = config.disk(Some("database"), Some("xvdb"));
    assert_eq!((database.sector_size, database.max_queues), (Some(4096), 8));
    assert_eq!(config.disk(Some("database"), Some("xvda")).sector_size, None);
    assert_eq!(config.disk(Some("scratch"), None).cache, CacheMode::Unsafe);
    assert_eq!(config.disk(None, None), Config::default().disk(None, None));
}

/// Each kind of fault, with its place and message.
#[test]
fn fault_is_reported_with_line_column_and_message() {
    let cases = [
        ("[network]\nbrigde = 'x'", "2:1: unknown key `brigde`; did you mean `bridge`?"),
        (
            "[network]\n\n  max_queues = 2",
            "3:3: unknown key `max_queues`; did you mean `max-queues`?",
        ),
        ("[netwerk]", "1:2: unknown key `netwerk`; did you mean `network`?"),
        (
            "[serve]\nzzzzzzzz = 1",
            "2:1: unknown key `zzzzzzzz`; the example configuration lists all that there are",
        ),
        ("[[device]]\ndomian = 'a'", "2:1: unknown key `domian`; did you mean `domain`?"),
        (
            "[network]\noffloads = 'sg,lro'",
            "2:12: `lro` is no offload: give `all`, `none`, or some of sg,tso4,tso6,csum4,csum6, with commas",
        ),
        ("[network]\noffloads = 'tso4'", "2:12: tso4 and tso6 need sg: add it, or take them out"),
        ("[network]\nmax-queues = 0", "2:14: 0 is not within 1 to 16"),
        ("[network]\nmax-queues = -1", "2:14: -1 is not within 1 to 16"),
        ("[network]\naddresses = 70000", "2:13: 70000 is not within 1 to 1024"),
        ("[network]\nstall-seconds = 3601", "2:17: 3601 is not within 1 to 3600"),
        ("[limits]\ndevices = 251", "2:11: 251 is not within 1 to 250"),
        (
            "[network]\nattach = 'router'",
            "2:10: unknown variant `router`, expected `bridge` or `switch`",
        ),
        (
            "[serve]\nlog-level = 'trace'",
            "2:13: unknown variant `trace`, expected one of `error`, `warn`, `info`, `debug`",
        ),
        ("[serve]\nstatus-socket = 'run/s'", "2:17: `run/s` is no absolute path of a file"),
        (
            "[network]\nbridge = 'a/b'",
            "2:10: an interface's name has 1 to 15 letters, digits, `-`, `_`, `.`",
        ),
        (
            "[metrics]\nlisten = '0.0.0.0:9709'",
            "2:10: 0.0.0.0 is not an address of the loopback interface: what is told about guests is for \
             this host alone; put a proxy with authentication before it",
        ),
        (
            "[metrics]\nlisten = '9709'",
            "2:10: `9709` is neither unix:/PATH nor an address and port like 127.0.0.1:9709",
        ),
        (
            "[metrics]\nlisten = '[::1]:0'",
            "2:10: port 0 is none that anybody could ask at: choose one, as in 127.0.0.1:9709",
        ),
        ("[network]\ncheck-source = 1", "2:16: invalid type: integer `1`, expected a boolean"),
        (
            "[[device]]\nmac = '01:00:5e:00:00:01'",
            "2:7: that is not the address of one station: the first byte must be even, and not all zero",
        ),
        (
            "\n[[device]]\nmode = 'map'",
            "2:1: exception 1 names neither a `domain` nor a `mac`; what holds for all devices belongs \
             in [network]",
        ),
        (
            "[disks]\nsector-size = 520",
            "2:15: 520 is no size of a sector: 512, 4096, or 0 for that of the medium",
        ),
        (
            "[disks]\npaths = ['images']",
            "2:9: `images` is no absolute path of a folder, without `..`",
        ),
        (
            "[disks]\npaths = ['/a/../..']",
            "2:9: `/a/../..` is no absolute path of a folder, without `..`",
        ),
        ("[disks]\nring-page-order = 5", "2:19: 5 is not within 0 to 4"),
        ("[disks]\nmax-qeues = 1", "2:1: unknown key `max-qeues`; did you mean `max-queues`?"),
        (
            "[[disk]]\nmode = 'map'",
            "1:1: exception 1 names neither a `domain` nor a `vdev`; what holds for all disks belongs \
             in [disks]",
        ),
        (
            "[[device]]\ndomain = 'a/b'",
            "2:10: invalid value: string \"a/b\", expected the name of a domain, as `xl list` shows it",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(wrong(text), format!("ringfence.toml:{expected}"), "{text}");
    }
    let mode = Mode::for_network("fast").unwrap_err();
    assert_eq!(wrong("[network]\nmode = 'fast'"), format!("ringfence.toml:2:8: {mode}"));
    let duplicate = wrong("[network]\nmode = 'map'\nmode = 'map'");
    assert!(duplicate.starts_with("ringfence.toml:3:1: duplicate key"), "{duplicate}");
    let syntax = wrong("[network\nmode = 1");
    assert!(syntax.starts_with("ringfence.toml:1:"), "{syntax}");
}

#[test]
fn file_beyond_limit_is_refused_and_missing_default_file_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ringfence.toml");
    assert_eq!(Config::load(&path, true).unwrap(), Config::default());
    let missing = Config::load(&path, false).unwrap_err().to_string();
    assert!(missing.contains("ringfence.toml: No such file"), "{missing}");
    std::fs::write(&path, "#".repeat(1 << 20)).unwrap();
    assert_eq!(Config::load(&path, false).unwrap(), Config::default());
    std::fs::write(&path, "#".repeat((1 << 20) + 1)).unwrap();
    assert!(matches!(Config::load(&path, true), Err(ConfigError::TooLarge { .. })));
    std::fs::write(&path, [0xFF, 0xFE]).unwrap();
    assert!(matches!(Config::load(&path, true), Err(ConfigError::Read { .. })), "no UTF-8");
}

#[test]
fn overrides_apply_in_order_when_all_conditions_match() {
    let text = "
        [[device]]
        domain = 'a'
        mode = 'map'
        addresses = 5
        [[device]]
        domain = 'a'
        mac = '02:00:00:00:00:01'
        mode = 'copy'
        [[device]]
        mac = '02:00:00:00:00:02'
        stall-seconds = 7
        max-queues = 2
        multicast-control = false";
    let config = parse(text).unwrap();
    let (one, two) = (Some([2, 0, 0, 0, 0, 1]), Some([2, 0, 0, 0, 0, 2]));
    let both = config.device(Some("a"), one);
    assert_eq!((both.mode, both.addresses), (Mode::Copy, 5));
    assert_eq!(config.device(Some("a"), None).mode, Mode::Map);
    assert_eq!(config.device(Some("b"), one).mode, Mode::Copy);
    let other = config.device(Some("a"), two);
    assert_eq!((other.mode, other.stall_seconds, other.max_queues), (Mode::Map, 7, 2));
    assert!(!other.multicast_control);
}

#[test]
fn each_changed_option_is_reported_and_restart_options_keep_value() {
    let old = Config::default();
    let changed = parse(
        "
        [serve]
        status-socket = '/run/other.sock'
        log-level = 'debug'
        [network]
        attach = 'switch'
        bridge = ''
        host-interface = 'rf0'
        mode = 'map'
        offloads = 'none'
        max-queues = 2
        check-source = false
        addresses = 3
        multicast-control = false
        stall-seconds = 5
        [disks]
        serve = false
        paths = ['/']
        nbd = false
        mode = 'copy'
        cache = 'writeback'
        bounce = 'always'
        engine = 'threads'
        sector-size = 4096
        max-queues = 1
        ring-page-order = 0
        indirect-segments = 0
        persistent-pages = 0
        persistent-seconds = 1
        [limits]
        devices = 7
        devices-per-domain = 3
        disks = 9
        disks-per-domain = 8
        [metrics]
        listen = 'unix:/run/m.sock'
        [[device]]
        domain = 'a'
        [[disk]]
        vdev = 'xvda'",
    )
    .unwrap();
    assert_eq!(old.changes_to(&changed).all(), effects::KEYS);
    assert_eq!(old.changes_to(&old).all(), []);
    let now = old.reloaded(changed.clone());
    let left: Vec<_> = now.changes_to(&changed).all().to_vec();
    assert!(left.iter().all(|(_, effect)| *effect == Effect::Restart), "{left:?}");
    let waiting: Vec<_> = old.changes_to(&changed).with(Effect::Restart).collect();
    assert_eq!(left.iter().map(|(name, _)| *name).collect::<Vec<_>>(), waiting);
    let level = parse("[serve]\nlog-level = 'warn'\n[network]\nattach = 'switch'").unwrap();
    assert_eq!(
        old.changes_to(&level).to_string(),
        "serve.log-level now; network.attach when the daemon is started again"
    );
}

proptest::proptest! {
    /// Checks that a reload of any text does not panic.
    #[test]
    fn random_text_does_not_panic_parser(text in "[\\[\\]a-z =\"'\n0-9.:,-]{0,80}") {
        let _ = parse(&text);
    }
}
