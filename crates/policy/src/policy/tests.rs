use proptest::prelude::*;

use super::*;

/// Parses a policy from words: `+RULE` allows, `-RULE` denies.
pub(crate) fn policy(words: &str) -> Policy {
    Policy::new(crate::testing::source(words)).unwrap()
}

fn name(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

fn allows(policy: &Policy, host: &str, port: u16) -> bool {
    policy.name(&name(host), port, Protocol::Tcp).is_allowed()
}

#[test]
fn first_allow_rule_denies_the_rest() {
    let open = policy("");
    assert!(open.resolve(&name("x.org")).is_allowed() && allows(&open, "x.org", 80));
    let only_deny = policy("-x.org");
    assert!(!only_deny.resolve(&name("x.org")).is_allowed());
    assert!(allows(&only_deny, "y.org", 80) && only_deny.denies_names());
    let policy = policy("+x.org:443");
    assert!(allows(&policy, "x.org", 443));
    assert!(!allows(&policy, "x.org", 80) && !allows(&policy, "y.org", 443));
    assert_eq!(policy.resolve(&name("y.org")), Verdict::deny(Cause::NoRule));
    assert!(!policy.denies_names());
}

#[test]
fn deny_rule_wins_in_any_order() {
    for words in ["+*.x.org -bad.x.org", "-bad.x.org +*.x.org"] {
        let policy = policy(words);
        assert!(allows(&policy, "good.x.org", 443), "{words}");
        assert!(!policy.resolve(&name("bad.x.org")).is_allowed(), "{words}");
    }
    let policy = policy("+x.org -x.org:25/tcp");
    assert!(policy.resolve(&name("x.org")).is_allowed(), "only one port is denied");
    assert!(allows(&policy, "x.org", 443) && !allows(&policy, "x.org", 25));
}

#[test]
fn wildcard_covers_names_below_at_any_depth_only() {
    let policy = policy("+*.x.org");
    assert!(allows(&policy, "a.x.org", 443) && allows(&policy, "a.b.x.org", 443));
    assert!(!allows(&policy, "x.org", 443) && !allows(&policy, "ax.org", 443));
    assert_eq!(policy.wildcard_of(&name("a.b.x.org")), Some(&name("x.org")));
}

#[test]
fn domain_covers_the_name_itself_and_names_below_it() {
    let closed = policy("+.x.org:443");
    for host in ["x.org", "a.x.org", "a.b.x.org"] {
        assert!(closed.resolve(&name(host)).is_allowed() && allows(&closed, host, 443), "{host}");
        assert!(!allows(&closed, host, 80));
    }
    assert!(!allows(&closed, "ax.org", 443) && !allows(&closed, "org", 443));
    assert_eq!(closed.wildcard_of(&name("x.org")), None);
    assert_eq!(closed.wildcard_of(&name("a.x.org")), Some(&name("x.org")));
    let denied = policy("+*.org -.x.org");
    assert!(!allows(&denied, "x.org", 443) && !allows(&denied, "a.x.org", 443));
    assert!(allows(&denied, "y.org", 443) && denied.denies_names());
    assert!(!policy("+.google").resolve(&name("dns.google")).is_allowed());
}

#[test]
fn wildcard_does_not_include_a_known_resolver() {
    let wide = policy("+*.google");
    assert_eq!(wide.resolve(&name("dns.google")), Verdict::deny(Cause::KnownDoh));
    assert!(wide.resolve(&name("about.google")).is_allowed());
    assert!(policy("+dns.google").resolve(&name("dns.google")).is_allowed());
    assert!(policy("+*.dns.nextdns.io").resolve(&name("a.dns.nextdns.io")).is_allowed());
    assert!(!policy("+*.nextdns.io").resolve(&name("a.dns.nextdns.io")).is_allowed());
}

#[test]
fn address_rule_with_matching_prefix_decides() {
    let policy = policy("+10.0.0.0/8:443 -10.9.0.0/16 +[2001:db8::]/32/udp");
    let tcp = |ip: &str, port| {
        policy.address(ip.parse().unwrap(), port, Protocol::Tcp).map(Verdict::is_allowed)
    };
    assert_eq!(tcp("10.1.2.3", 443), Some(true));
    assert_eq!(tcp("10.1.2.3", 80), None);
    assert_eq!(tcp("10.9.2.3", 443), Some(false));
    assert_eq!(tcp("11.1.2.3", 443), None);
    assert_eq!(tcp("2001:db8::1", 443), None);
    let udp = policy.address("2001:db8::1".parse().unwrap(), 1, Protocol::Udp);
    assert_eq!(udp, Some(Verdict::allow(Cause::Rule(2))));
    assert!(policy.accepts_in_answers("10.1.1.1".parse().unwrap()));
    assert!(!policy.accepts_in_answers("192.168.0.1".parse().unwrap()));
}

#[test]
fn echo_requests_need_rule_icmp_and_a_destination() {
    let echo =
        |policy: &Policy, host: &str| policy.name(&name(host), 0, Protocol::Icmp).is_allowed();
    assert!(!echo(&policy("+x.org:443"), "x.org"));
    assert!(echo(&policy("+x.org:443 +icmp"), "x.org"));
    assert!(!echo(&policy("+x.org:443 +icmp"), "y.org"));
    assert!(echo(&policy("-y.org"), "x.org") && !echo(&policy("-icmp"), "x.org"));
}

#[test]
fn error_names_origin_and_position() {
    let mut source = crate::testing::source("+ok.org");
    let (text, origin) = ("bad.org:http".to_owned(), "p.toml:3".to_owned());
    source.rules.push(RuleSource { action: Action::Allow, text, origin });
    let error = Policy::new(source).err().unwrap().to_string();
    assert!(error.starts_with("p.toml:3: a port is a number"), "{error}");
    assert!(error.ends_with("  bad.org:http\n          ^"), "{error}");
}

proptest! {
    /// Compares the indices with a linear search.
    #[test]
    fn verdict_equals_that_of_a_linear_search(
        rules in prop::collection::vec(("[+-]", "(\\*\\.|\\.)?[ab](\\.[ab]){0,2}\\.c(:[12])?"), 0..12),
        host in "[ab](\\.[ab]){0,3}\\.c",
        port in 1..4_u16,
    ) {
        let words: Vec<String> = rules.iter().map(|(sign, rule)| format!("{sign}{rule}")).collect();
        let policy = policy(&words.join(" "));
        let matches = |text: &str| {
            let (target, listed) = text.split_once(':').unwrap_or((text, ""));
            let is_below = |parent: &str| host.ends_with(&format!(".{parent}"));
            let fits = match (target.strip_prefix("*."), target.strip_prefix('.')) {
                (Some(parent), _) => is_below(parent),
                (None, Some(parent)) => host == parent || is_below(parent),
                (None, None) => host == target,
            };
            fits && (listed.is_empty() || listed == port.to_string())
        };
        let any = |wanted: &str| rules.iter().any(|(sign, rule)| sign == wanted && matches(rule));
        let is_closed = rules.iter().any(|(sign, _)| sign == "+");
        let expected = !any("-") && (any("+") || !is_closed);
        prop_assert_eq!(allows(&policy, &host, port), expected);
    }
}

/// Parses a policy of rules that allow, with blanks.
fn limited(rules: &[&str]) -> Policy {
    let rules = rules.iter().map(|text| RuleSource {
        action: Action::Allow,
        text: (*text).to_owned(),
        origin: "p.toml:1".to_owned(),
    });
    Policy::new(PolicySource { rules: rules.collect(), ..PolicySource::default() }).unwrap()
}

#[test]
fn limits_of_all_rules_that_cover_a_flow_apply() {
    let policy = limited(&[
        "*.x.org:443 bytes=1M",
        "a.x.org",
        "a.x.org:443/tcp at-once=2",
        "a.x.org:80 connections=1",
        "192.0.2.0/24 bytes=2M",
        "192.0.2.1",
    ]);
    let to = |port| SocketAddr::from(([192, 0, 2, 1], port));
    let of = |cause, host: Option<&str>, port, protocol| {
        let host = host.map(name);
        let mut found = policy.limited(cause, host.as_ref(), to(port), protocol);
        found.sort_unstable();
        found
    };
    let by_name = policy.name(&name("a.x.org"), 443, Protocol::Tcp).cause;
    assert_eq!(of(by_name, Some("a.x.org"), 443, Protocol::Tcp), [0, 2]);
    assert_eq!(of(by_name, Some("a.x.org"), 443, Protocol::Udp), [0]);
    assert_eq!(of(by_name, Some("a.x.org"), 80, Protocol::Tcp), [3]);
    assert_eq!(of(by_name, Some("b.x.org"), 443, Protocol::Tcp), [0]);
    let by_address = policy.address(to(443).ip(), 443, Protocol::Tcp).unwrap().cause;
    assert_eq!(of(by_address, Some("a.x.org"), 443, Protocol::Tcp), [4]);
    assert!(of(Cause::NoRule, Some("a.x.org"), 443, Protocol::Tcp).is_empty());
    let text = policy.describe(Cause::Limit(2, LimitKind::AtOnce));
    assert_eq!(text, "limit on connections at once of allow a.x.org:443/tcp at-once=2 (p.toml:1)");
    assert_eq!(policy.missing_rule(Cause::Limit(2, LimitKind::AtOnce), None, None), None);
}

#[test]
fn rule_that_denies_has_no_limits() {
    let rule = RuleSource {
        action: Action::Deny,
        text: "a.org:443 bytes=1".to_owned(),
        origin: "--deny".to_owned(),
    };
    let source = PolicySource { rules: vec![rule], ..PolicySource::default() };
    let error = Policy::new(source).err().unwrap().to_string();
    assert!(
        error.starts_with("--deny: only a rule that allows") && error.ends_with("\n            ^")
    );
}
