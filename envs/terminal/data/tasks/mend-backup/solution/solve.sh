#!/bin/bash
cat > /app/backup.sh <<'END'
#!/bin/bash
set -euo pipefail
mkdir -p -- "$2"
for file in "$1"/*; do
    if [ -f "$file" ] && [ -s "$file" ]; then cat -- "$file" > "$2/${file##*/}.bak"; fi
done
END
