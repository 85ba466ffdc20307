"""count_tests.py REPORT.xml: prints "passed failed skipped" of a JUnit report by ctest or pytest."""

import sys
import xml.etree.ElementTree as ElementTree

passed = failed = skipped = 0
for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    children = {child.tag for child in case}
    if children & {"failure", "error"}:
        failed += 1
    elif "skipped" in children or case.get("status") in ("notrun", "disabled"):
        skipped += 1
    else:
        passed += 1
print(passed, failed, skipped)
